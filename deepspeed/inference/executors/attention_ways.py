"""Ways to compute attention on pages on a GPU, and the choice among them when a generator starts.

Each layer takes the first way that has what the layer needs: torch's flash attention over block tables (`FlashWay`),
the package's compiled kernels (`KernelWay`), or, without an entry here, `paged._attend`, which gathers pages. A choice
is kept if the logits of mixed passes agree with the model's own. Nothing is compiled: kernels that are not there are
not used, and a line says so once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.accelerator.cuda_driver import compute_capability
from deepspeed.errors import DeepSpeedError, PackingError
from deepspeed.inference.executors.mask_shape import MaskShape, mask_shape
from deepspeed.inference.executors.pass_inputs import PassInputs
from deepspeed.inference.executors.ragged_batch import RaggedBatch
from deepspeed.ops.triton.attention import AttentionRule, Kernels, attend_pages
from deepspeed.ops.triton.variants import attention_variants, unsupported

FLASH_PAGE = 256  # flash attention reads pages of a multiple of so many tokens
FLASH_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer, as its module calls it.

    Args:
        dtype: dtype of the queries.
        head: size of query and key heads.
        value: size of value heads.
        heads: number of query heads.
        cached: number of key-value heads.
        scale: factor of the scores.
        cap: soft cap of the scores; None: none.
        sinks: whether heads have sinks.
        shape: what its rows see.
    """

    dtype: torch.dtype
    head: int
    value: int
    heads: int
    cached: int
    scale: float
    cap: float | None
    sinks: bool
    shape: MaskShape = MaskShape()

    def alike(self, other: LayerAttention) -> bool:
        """Whether two calls differ in the shapes of their masks at most."""
        return self == replace(other, shape=self.shape)

    @property
    def rule(self) -> AttentionRule:
        """Arguments of the kernels."""
        return AttentionRule(self.scale, self.shape.window, self.shape.chunk, self.cap)


class AttentionWay(Protocol):
    """A way to compute attention on pages."""

    name: str

    def why_not(self, layer: LayerAttention, page: int) -> str | None:
        """Return the reason why a layer with pages of `page` tokens cannot take this way, or None."""
        ...

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        batch: RaggedBatch | PassInputs,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of all rows of a pass, [rows, heads, value size]; `query`: [rows, heads, head size]."""
        ...


class FlashWay:
    """torch's flash attention with block tables; it has no CPU form.

    Args:
        function: `torch.nn.attention.varlen.varlen_attn`, or another one in tests.
    """

    name = "flash"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def why_not(self, layer: LayerAttention, page: int) -> str | None:
        reasons = {
            f"it has no {layer.dtype}": layer.dtype not in FLASH_DTYPES,
            f"it has no heads of {layer.head} and {layer.value}": layer.head != layer.value
            or layer.head > 256
            or layer.head % 8 != 0,
            "it has no soft caps": layer.cap is not None,
            "it has no sinks": layer.sinks,
            "it has no chunks": layer.shape.chunk != 0,
            f"its pages have a multiple of {FLASH_PAGE} tokens, not {page}": page % FLASH_PAGE != 0,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        batch: RaggedBatch | PassInputs,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, page = batch.paged_rows, batch.page_size
        keys, values = (pool.view(-1, page, *pool.shape[1:]) for pool in pools)
        starts, lengths = batch.row_starts, batch.context_lengths
        return self._function(
            query, keys, values, starts, None, max(rows.counts), max(rows.lengths), scale=layer.scale,
            window_size=(layer.shape.window - 1 if layer.shape.window else -1, 0), enable_gqa=True,
            seqused_k=lengths, block_table=batch.block_table,
            num_splits=1,  # so that a row's bits do not depend on the others
        )  # fmt: skip


class KernelWay:
    """The package's own kernels.

    Args:
        kernels: compiled kernels, or interpreted ones in tests.
    """

    name = "kernels"

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def why_not(self, layer: LayerAttention, page: int) -> str | None:
        if (reason := unsupported(layer.dtype, layer.head, layer.value)) is not None:
            return reason
        if not layer.scale > 0:
            return f"its scale is {layer.scale}, and kernels need a positive one"
        variants = attention_variants(layer.dtype, layer.head, layer.value, page, layer.cap is not None).values()
        missing = next((variant.name for variant in variants if not self.kernels.has(variant)), None)
        if missing is not None:
            return f"{missing} is not compiled"
        self.kernels.prepare(variants)
        return None

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        batch: RaggedBatch | PassInputs,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return attend_pages(self.kernels, query, pools, batch.paged_rows, batch.page_size, layer.rule, sinks)


def ways_of(device: torch.device) -> tuple[list[AttentionWay], str]:
    """Return the ways that a device has, the best first, and the reason why the package's kernels are not among them.

    Raises:
        CheckpointCorruptError: files of the compiled kernels are damaged.
    """
    if device.type != "cuda":
        return [], ""
    ways: list[AttentionWay] = []
    function = flash_function()
    if function is not None and compute_capability(device) >= (8, 0):
        ways.append(FlashWay(function))
    try:
        from deepspeed.ops.triton.load import load_kernels

        ways.append(KernelWay(load_kernels(device=device)))
    except DeepSpeedError as error:
        return ways, str(error)
    return ways, ""


def flash_function() -> Callable[..., Any] | None:
    """Return torch's attention over block tables, or None if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def choose_ways(
    layers: dict[int, LayerAttention], ways: list[AttentionWay], page: int
) -> tuple[dict[int, AttentionWay], list[str]]:
    """Return the way of each layer that has one, and the reasons why others do not, without repetition."""
    chosen: dict[int, AttentionWay] = {}
    reasons: dict[str, None] = {}
    for number, layer in layers.items():
        refused = []
        for way in ways:
            reason = way.why_not(layer, page)
            if reason is None:
                chosen[number] = way
                break
            refused.append(f"{way.name}: {reason}")
        if number not in chosen:
            reasons |= dict.fromkeys(refused)
    return chosen, list(reasons)


def shaped(
    layers: dict[int, LayerAttention], rules: dict[int, Any], model: nn.Module, device: torch.device
) -> dict[int, LayerAttention]:
    """Return the layers with the shapes of their masks, without those whose mask is of another kind.

    Args:
        layers: layers as their modules called attention.
        rules: mask of each layer.
        model: their model.
        device: its device.
    """
    known: dict[int, MaskShape | None] = {}
    result = {}
    for number, layer in layers.items():
        rule = rules[number]
        if id(rule) not in known:
            try:
                known[id(rule)] = mask_shape(rule.function, model, device)
            except PackingError:
                known[id(rule)] = None
        shape = known[id(rule)]
        if shape is not None:
            result[number] = replace(layer, shape=shape)
    return result
