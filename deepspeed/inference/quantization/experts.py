"""Gated experts whose matrices are stacked along dim 0: recognition by structure, and their packed form."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.errors import PackingError
from deepspeed.foundation.equivalence import relative_difference, tolerance
from deepspeed.foundation.log import describe_error, log_rank0
from deepspeed.inference.quantization.layers import Whole
from deepspeed.inference.quantization.lossless_bf16 import LosslessWeight, Room
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.parameters.parameter import is_managed

NAMES = ("gate_up_proj", "down_proj")  # [experts, 2 · inner, width] and [experts, width, inner]
TRIED = 3  # experts that a trial runs
SIZES = (1.0, 30.0, 1000.0)  # of a trial's rows: large ones reveal limits on values
Product = Callable[[torch.Tensor, int], torch.Tensor]


def run_gated(
    rows: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Product,
    down: Product,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sums of the results of each row's experts, [rows, width].

    Args:
        rows: [rows, width].
        index: [rows, k], experts of each row.
        weights: [rows, k].
        gate_up: product of rows with the joined matrix of one expert.
        down: product of rows with the second matrix of one expert.
        act: activation function of the gate.
    """
    out = torch.zeros_like(rows)
    for expert in index.unique().tolist():
        row, place = torch.where(index == expert)
        gate, up = gate_up(rows[row], expert).chunk(2, dim=-1)
        part = down(act(gate) * up, expert) * weights[row, place, None]
        out.index_add_(0, row, part.to(out.dtype))
    return out


def stacks_of(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (gate_up, down), the matrices of stacked experts, without running them; PackingError for other modules."""
    kind, params = type(module).__name__, module._parameters
    if set(params) != set(NAMES) or set(module._modules) != {"act_fn"} or module._buffers:
        raise PackingError(f"{kind} has other parts than {', '.join(NAMES)} and act_fn")
    gate_up, down = (params[name] for name in NAMES)
    if gate_up is None or down is None or gate_up.dim() != 3 or gate_up.dtype != down.dtype:
        raise PackingError(f"{kind} has matrices that are not stacked")
    if gate_up.is_meta:
        raise PackingError(f"{kind} has matrices without values")
    if placement_of(gate_up).ep > 1:
        raise PackingError(f"{kind} has some of the experts: the others are on other ranks")
    experts, joined, width = gate_up.shape
    if (
        joined % 2
        or down.shape != (experts, width, joined // 2)
        or not (gate_up.is_contiguous() and down.is_contiguous())
    ):
        raise PackingError(f"{kind} has matrices {tuple(gate_up.shape)} and {tuple(down.shape)}")
    return gate_up, down


@torch.no_grad()
def try_gated(module: nn.Module) -> None:
    """Compare the forward of stacked experts with `run_gated` on random rows; PackingError if the results differ."""
    gate_up, down = stacks_of(module)
    if is_managed(gate_up) or is_managed(down):
        raise PackingError(f"{type(module).__name__} has sharded matrices")
    act: Any = module._modules["act_fn"]
    some, kind = min(TRIED, len(gate_up)), type(module).__name__
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * some, gate_up.shape[2], generator=generator).to(gate_up)
    first = torch.arange(2 * some, device=rows.device) % some
    index = torch.stack([first, (first + 1) % some], 1) if some > 1 else first[:, None]
    weights = (0.25 + torch.rand(index.shape, generator=generator)).to(gate_up)
    for size in SIZES:
        expected = run_gated(
            rows * size, index, weights, lambda x, e: x @ gate_up[e].T, lambda x, e: x @ down[e].T, act
        )  # fmt: skip
        if not expected.isfinite().all() or not expected.any():
            if size == SIZES[0]:
                raise PackingError(f"{kind} has results on random rows that are all 0, or not finite")
            continue  # out of the range of fp16
        try:
            actual = module(rows * size, index, weights)
        except Exception as error:  # any error of a module with another interface
            why = f"{kind} is called otherwise than with rows, experts, weights: {describe_error(error)}"
            raise PackingError(why) from error
        if not isinstance(actual, torch.Tensor):
            raise PackingError(f"{kind} returns a {type(actual).__name__}")
        if not relative_difference(actual, expected) <= tolerance(rows.dtype):
            raise PackingError(f"{kind} does not compute down(act(gate) * up)")


def packable_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the experts that `PackedExperts` can replace; log why others stay whole."""
    reasons: Counter[str] = Counter()
    for name, module in list(model.named_modules()):
        if not set(NAMES) <= set(module._parameters):
            continue
        try:
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                raise PackingError("they have hooks or a forward of their own")
            try_gated(module)
        except PackingError as error:
            reasons[str(error)] += 1
            continue
        yield name, module
    for reason, count in reasons.items():
        log_rank0(f"the experts of {count} layers stay whole: {reason}")


class PackedExperts(nn.Module):
    """Gated experts with packed matrices: `gate_up` [experts · 2 · inner, width], `down` [experts · width, inner]."""

    def __init__(self, gate_up: Any, down: Any, module: nn.Module) -> None:
        super().__init__()
        act_fn: Any = module._modules["act_fn"]
        self.gate_up, self.down, self.act_fn = gate_up, down, act_fn
        self.num_experts = len(module.get_parameter(NAMES[0]))
        self._arguments = list(inspect.signature(type(module).forward).parameters)[1:4]  # callers may name them

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map rows [rows, width], their experts and weights [rows, k] to [rows, width]."""
        rows, index, weights = (*args, *(kwargs[name] for name in self._arguments[len(args) :]))
        gate_up, down = (self._product(packed) for packed in (self.gate_up, self.down))
        return run_gated(rows, index, weights, gate_up, down, self.act_fn)

    def _product(self, packed: Any) -> Product:
        each = packed.shape[0] // self.num_experts

        def product(rows: torch.Tensor, expert: int) -> torch.Tensor:
            numbers = torch.arange(expert * each, (expert + 1) * each, device=rows.device)
            return rows @ packed.rows(numbers).to(rows.dtype).T

        return product


class LosslessExperts(Whole, PackedExperts):
    """Gated experts with bf16 matrices packed in 12 bits, without loss."""

    def matrices(self) -> Iterator[tuple[str, LosslessWeight, torch.Size]]:
        for name, packed in zip(NAMES, (self.gate_up, self.down), strict=True):
            rows, columns = packed.shape
            yield name, packed, torch.Size((self.num_experts, rows // self.num_experts, columns))


def pack_lossless(module: nn.Module, room: Room) -> LosslessExperts:
    """Return experts with matrices in 12 bits per element; PackingError if a matrix cannot be packed."""
    stacks = stacks_of(module)
    gate_up, down = (LosslessWeight(stack.detach().flatten(0, 1), room) for stack in stacks)
    return LosslessExperts(gate_up, down, module)


def pack_integers(module: nn.Module, forms: list[PackingFormat], dtype: torch.dtype | None) -> PackedExperts:
    """Return experts packed as integers, one after the other, to save memory; `forms`: one per matrix in `NAMES`."""
    packed, stacks = [], stacks_of(module)
    for stack, form in zip(stacks, forms, strict=True):
        parts = [PackedWeight(matrix, form, dtype) for matrix in stack.detach()]
        names = ("integers", "scale", "offset")
        whole = (torch.cat([getattr(part, name) for part in parts]) for name in names)
        shape = stack.flatten(0, 1).shape
        packed.append(PackedWeight.of(form, shape, *whole, dtype or stack.dtype))  # type: ignore[misc,arg-type]
    gate_up, down = packed
    return PackedExperts(gate_up, down, module)
