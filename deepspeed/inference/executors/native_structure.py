"""Native form of a decoder's structure: ctypes structures of the native library, filled from the reader's parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.errors import PackingError
from deepspeed.inference.executors.native_experts import experts_of, routing_of
from deepspeed.inference.executors.native_tensors import GatedMlp, Layer, Matrix, Norm, matrix_of, rows_of
from deepspeed.inference.executors.structure import (
    GatedPart,
    HeadPart,
    LayerPart,
    MatrixPart,
    MixturePart,
    NormPart,
    Structure,
)
from deepspeed.inference.quantization.float8 import Float8Linear
from deepspeed.inference.quantization.layers import PackedEmbedding
from deepspeed.native import KINDS


class NativeStructure(Structure):
    """Parts of a model that the native library runs.

    Attributes:
        layers: array of `Layer` for the native library; `FusedExecutor` sets the field `heads`.
        norm: final norm.
        head: matrix of the LM head.
        table: the embedding, if its rows can be read natively.
        kind: dtype code of a packed table's rows.
        experts: arrays to which entries of `layers` point.
    """

    def __init__(self, base: Any, lm_head: Any, blocks: list[Any]) -> None:
        super().__init__(base, lm_head, blocks)
        self.layers: Any = (Layer * len(blocks))()
        self.norm, self.head = Norm(), Matrix()
        self.table: Matrix | None = None
        self.kind = 0
        self.experts: dict[int, Any] = {}

    def take_embedding(self, module: Any) -> None:
        self.table, self.kind = table_of(module)

    def take_head(self, head: HeadPart) -> None:
        self.head, self.norm = native_matrix(head.head), native_norm(head.norm)

    def take_layer(self, number: int, layer: LayerPart) -> None:
        native = self.layers[number]
        native.before, native.after = native_norm(layer.before), native_norm(layer.after)
        for name in ("out", "q", "k", "v"):
            setattr(native, name, native_matrix(getattr(layer, name)))
        for name in ("query", "key"):
            if (norm := getattr(layer, name)) is not None:
                setattr(native, name, native_norm(norm))
        if isinstance(layer.mlp, MixturePart):
            self._take_mixture(native, layer.mlp)
        else:
            native.mlp, native.activation = _gated(layer.mlp), layer.mlp.activation

    def _take_mixture(self, native: Any, mixture: MixturePart) -> None:
        weight, native.experts.chosen, native.experts.normalized = routing_of(mixture.router)
        matrix = matrix_of(weight)
        if isinstance(matrix, str):
            raise PackingError(f"its router: {matrix}")
        each, even = experts_of(mixture.experts, len(weight))
        if not even:
            self.mark_uneven(mixture.experts)
        native.experts.router, native.experts.each, native.experts.count = matrix, each, len(weight)
        self.experts[id(mixture.module)] = each
        native.activation = mixture.activation
        if mixture.shared is not None and mixture.shared_gate is not None:
            native.mlp, native.experts.shared_gate = _gated(mixture.shared), native_matrix(mixture.shared_gate)


def _gated(part: GatedPart) -> GatedMlp:
    down = native_matrix(part.down)
    return GatedMlp(native_matrix(part.gate), native_matrix(part.up), down)


def native_matrix(part: MatrixPart) -> Matrix:
    """Return the native structure of a matrix. PackingError if it is not supported."""
    weight = part.weight
    if isinstance(weight, Float8Linear):
        raise PackingError(f"{part.name} is in fp8")
    matrix = matrix_of(weight, part.bias)
    if isinstance(matrix, str):
        raise PackingError(f"{part.name}: {matrix}")
    return matrix if part.count is None else rows_of(matrix, part.first, part.count)


def native_norm(part: NormPart) -> Norm:
    """Return the native structure of a norm. PackingError if it is not supported."""
    weight, bias = part.weight, part.bias
    if weight.dtype not in (torch.float32, torch.bfloat16) or (bias is not None and bias.dtype != weight.dtype):
        raise PackingError(f"{part.name} has weights of {weight.dtype}")
    norm = Norm(weight=weight.data_ptr(), kind=KINDS[weight.dtype], eps=part.eps)
    norm.bias = None if bias is None else bias.data_ptr()
    norm.centred, norm.joint = part.centred, part.joint
    return norm


def table_of(module: Any) -> tuple[Matrix | None, int]:
    """Return an embedding table as a native matrix, and the dtype code of its rows; (None, 0) if unsupported."""
    if isinstance(module, PackedEmbedding):
        weight: Any = module.packed if module.embed_scale is None else None
    else:
        plain = type(module).forward is nn.Embedding.forward and module.max_norm is None
        weight = module.weight if plain else None
    if weight is None or weight.dtype not in KINDS:
        return None, 0
    matrix = matrix_of(weight)
    return (matrix, KINDS[weight.dtype]) if isinstance(matrix, Matrix) else (None, 0)
