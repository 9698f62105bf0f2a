"""Collectives of `autograd.py` as operators in graphs of torch.compile.

Dynamo, the part of torch.compile that traces Python, would break a graph at each collective. After
`register_operators`, it writes one operator in place of each call of `summed`, `gathered` and `exchanged`; their
autograd functions it traces. The operator calls the function when the graph runs, in forward and in backward. So
check-ins, watchdog, comms logger and timeline see every call. Uncompiled code does not use the operators.

An operator names its axis by the ranks, which are numbers that a graph can hold: there is one `Axis` per set of ranks
and device. Collectives of one graph run in the graph's order, so ranks must compile equal graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.comm.collectives import autograd
from deepspeed.comm.process_groups.axis import Axis, axes_here
from deepspeed.errors import UsageError


@functools.cache
def register_operators() -> None:
    """Register the operators with torch, and their places in graphs with dynamo; imports torch's compiler."""
    operators: list[tuple[str, Any, Any, str]] = [
        ("summed", _summed, _shape_of_sum, ""),
        ("gathered", _gathered, _shape_of_whole, "int dim, int[]? sizes, "),
        ("exchanged", _exchanged, _shape_of_exchanged, "int cut, int join, "),
    ]
    for name, function, shape, arguments in operators:
        schema = f"(Tensor tensor, int[] ranks, {arguments}str label) -> Tensor"
        torch.library.custom_op(
            f"deepspeed::{name}", function, mutates_args=(), schema=schema, tags=torch.Tag.cudagraph_unsafe
        ).register_fake(shape)  # other ranks are awaited: not to be captured by mode="reduce-overhead"
    torch.compiler.allow_in_graph(_entered)
    substitutes: dict[Any, Any] = {
        autograd.summed: _traced_summed,
        autograd.gathered: _traced_gathered,
        autograd.exchanged: _traced_exchanged,
        autograd.enter: _traced_enter,
    }
    for function, substitute in substitutes.items():
        torch.compiler.substitute_in_graph(function)(substitute)


def _axis(ranks: Sequence[int], tensor: torch.Tensor) -> Axis:
    axis = axes_here().axes.get((tuple(ranks), tensor.device.type))
    if axis is None:
        raise UsageError(
            f"a graph of torch.compile sums or exchanges tensors on {tensor.device.type} over ranks {list(ranks)}, "
            f"which have no process group: it was compiled before the process groups ended; compile the model again"
        )
    return axis


# -- when a graph runs ------------------------------------------------------------------------------------------------


def _summed(tensor: torch.Tensor, ranks: Sequence[int], label: str) -> torch.Tensor:
    return autograd.summed(tensor, _axis(ranks, tensor), label)


def _gathered(
    tensor: torch.Tensor, ranks: Sequence[int], dim: int, sizes: Sequence[int] | None, label: str
) -> torch.Tensor:
    return autograd.gathered(tensor, _axis(ranks, tensor), dim, sizes, label)


def _exchanged(tensor: torch.Tensor, ranks: Sequence[int], cut: int, join: int, label: str) -> torch.Tensor:
    return autograd.exchanged(tensor, _axis(ranks, tensor), cut, join, label)


# -- results without values, for their shapes --------------------------------------------------------------------------


def _shape_of_sum(tensor: torch.Tensor, ranks: Sequence[int], label: str) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _shape_of_whole(
    tensor: torch.Tensor, ranks: Sequence[int], dim: int, sizes: Sequence[int] | None, label: str
) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = shape[dim] * len(ranks) if sizes is None else sum(sizes)
    return tensor.new_empty(shape)


def _shape_of_exchanged(tensor: torch.Tensor, ranks: Sequence[int], cut: int, join: int, label: str) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[cut] //= len(ranks)
    shape[join] *= len(ranks)
    return tensor.new_empty(shape)


# -- what dynamo traces in place of a function ------------------------------------------------------------------------


def _traced_summed(tensor: torch.Tensor, axis: Axis, label: str = "") -> torch.Tensor:
    return torch.ops.deepspeed.summed(tensor.detach(), axis.ranks, label)


def _traced_gathered(
    tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None, label: str = ""
) -> torch.Tensor:
    if axis.size == 1:
        return tensor.detach().clone()
    return torch.ops.deepspeed.gathered(tensor.detach(), axis.ranks, dim, sizes, label)


def _traced_exchanged(tensor: torch.Tensor, axis: Axis, cut: int, join: int, label: str = "") -> torch.Tensor:
    if axis.size == 1:
        return tensor.detach().clone()
    return torch.ops.deepspeed.exchanged(tensor.detach(), axis.ranks, cut, join, label)


def _traced_enter(tensor: torch.Tensor, axis: Axis, label: str = "") -> torch.Tensor:
    if axis.size == 1 or not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return _entered(tensor, axis.ranks, label)


def _entered(tensor: torch.Tensor, ranks: tuple[int, ...], label: str) -> torch.Tensor:
    """Operator in graphs for `enter`.

    A graph has one for each layer. When the graph runs, or a backend traces it with autograd, the layers that read one
    tensor share a copy, as without compilation.
    """

    def back(gradient: torch.Tensor) -> Any:
        return torch.ops.deepspeed.summed(gradient, ranks, label)

    return autograd.enter_once(tensor, ranks, back)
