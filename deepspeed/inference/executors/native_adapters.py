"""LoRA adapters of the native executor: ctypes structures that point to their matrices."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import nn

from deepspeed.errors import PackingError
from deepspeed.inference.adapters import LoraAdapter, LowRankMatrices, parts_of
from deepspeed.inference.executors.ragged_batch import RaggedBatch
from deepspeed.native import KINDS

# Matrices of a native layer by the name of the module in the layer, in the order of a joined module's rows.
MATRICES = {
    "self_attn.q_proj": ("q",), "self_attn.k_proj": ("k",), "self_attn.v_proj": ("v",), "self_attn.o_proj": ("out",),
    "self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_proj": ("gate",), "mlp.up_proj": ("up",),
    "mlp.down_proj": ("down",), "mlp.gate_up_proj": ("gate", "up"),
}  # fmt: skip
SHARED = "mlp.shared_expert."


class LowRank(ctypes.Structure):
    """ctypes mirror of `LowRank` in adapters.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("down", "up")),
        *((name, ctypes.c_int64) for name in ("rank", "stride")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int32),
    ]


class LayerAdapter(ctypes.Structure):
    """ctypes mirror of `LayerAdapter` in adapters.h: changes of the matrices of one layer."""

    _fields_ = [(name, LowRank) for name in ("q", "k", "v", "out", "gate", "up", "down")]


class AdaptedRows(ctypes.Structure):
    """ctypes mirror of `AdaptedRows` in adapters.h: consecutive rows of a pass with one adapter."""

    _fields_ = [("first", ctypes.c_int64), ("count", ctypes.c_int64), ("layers", ctypes.c_void_p)]


def bind(adapter: LoraAdapter, model: nn.Module, blocks: list[Any], layers: Any) -> None:
    """Set `adapter.native`, an array of `LayerAdapter`.

    Args:
        adapter: the adapter; its matrices must not be moved afterwards.
        model: the model.
        blocks: its decoder layers.
        layers: the same as an array of `Layer`.

    Raises:
        PackingError: the adapter changes a module whose changes are not native.
    """
    numbers = {id(block): number for number, block in enumerate(blocks)}
    places = {name: numbers[id(module)] for name, module in model.named_modules() if id(module) in numbers}
    native = (LayerAdapter * len(blocks))()
    for key, pair in adapter.matrices.items():
        block = next((name for name in places if key.startswith(f"{name}.")), None)
        inside = key if block is None else key.removeprefix(f"{block}.")
        inside = f"mlp.{inside.removeprefix(SHARED)}" if inside.startswith(SHARED) else inside
        if block is None or inside not in MATRICES or pair.down.dtype not in KINDS:
            raise PackingError(f"it changes {key} ({pair.down.dtype}), and native passes have no changes of it")
        number, first = places[block], 0
        for name in MATRICES[inside]:
            owner = layers[number] if hasattr(layers[number], name) else layers[number].mlp
            setattr(native[number], name, _pointers(pair, first))
            first += getattr(owner, name).outputs
        if first != pair.up.shape[1]:
            raise PackingError(f"{key} has {pair.up.shape[1]} outputs, and its native matrices have {first}")
    adapter.native = native


def _pointers(pair: LowRankMatrices, first: int) -> LowRank:
    """Return the change of the outputs from number `first` on."""
    rank, outputs = pair.up.shape
    up = pair.up.data_ptr() + first * pair.up.element_size()
    return LowRank(pair.down.data_ptr(), up, rank, outputs, pair.scale, KINDS[pair.down.dtype])


def adapted_rows(batch: RaggedBatch, first: int, own: LoraAdapter | None = None) -> Any:
    """Return an array of `AdaptedRows` for the adapters of a batch, whose layers begin with number `first`.

    Args:
        batch: the batch.
        first: number of the first layer.
        own: adapter of the rows that have none, which is the model's own.
    """
    parts = parts_of(batch, own)
    rows = (AdaptedRows * len(parts))()
    for entry, (span, adapter) in zip(rows, parts, strict=True):
        entry.first, entry.count = span.start, span.stop - span.start
        entry.layers = ctypes.addressof(adapter.native) + first * ctypes.sizeof(LayerAdapter)
    return rows
