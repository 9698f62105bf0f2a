"""Collectives as autograd functions.

| function         | forward        | backward       | where                                                   |
|------------------|----------------|----------------|---------------------------------------------------------|
| `copy_to`        | –              | sum            | equal inputs of rank-specific computations              |
| `reduce_from`    | sum            | –              | partial sums as outputs                                 |
| `gather_from`    | all-gather     | own slice      | slices to a whole tensor, for equal computations        |
| `scatter_to`     | own slice      | all-gather     | a whole tensor to slices                                |
| `gather_to`      | all-gather     | reduce-scatter | slices to a whole tensor, rank-specific computations    |
| `reduce_scatter` | reduce-scatter | all-gather     | partial sums to slices of the sum                       |
| `all_to_all`     | all-to-all     | all-to-all     | sharded along one dim to sharded along another          |

A reduce-scatter is an all-reduce and a slice. All ranks of the axis must call these functions in the same order,
forward and backward. A second derivative raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import TensorWeakRef

from deepspeed.comm.collectives.same_error import meet_before
from deepspeed.comm.collectives.torch_api import all_gather_into_tensor, all_reduce, all_to_all_single
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.foundation.compiler import opaque
from deepspeed.foundation.fake_mode import message

_Way = Callable[[torch.Tensor], torch.Tensor]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: _Way, back: _Way) -> torch.Tensor:  # type: ignore[override]
        ctx.back = back
        return there(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.back(gradient), None, None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _over(axis: Axis, tensor: torch.Tensor, there: _Way, back: _Way) -> torch.Tensor:
    return tensor if axis.size == 1 else _Collective.apply(tensor, there, back)  # type: ignore[no-any-return]


@opaque
def summed(tensor: torch.Tensor, axis: Axis, label: str = "") -> torch.Tensor:
    """Return the sum over the ranks as a new tensor, without autograd; `label`: as in `gathered`."""
    return sum_in_place(tensor.detach().clone(memory_format=torch.contiguous_format), axis, label)


def sum_in_place(tensor: torch.Tensor, axis: Axis, label: str = "") -> torch.Tensor:
    """All-reduce a contiguous tensor in place, without autograd, and return it; `label`: as in `gathered`."""
    if axis.group is not None and tensor.numel():
        label = label or f"sum over {axis.name}"
        meet_before(axis, label)
        all_reduce(tensor, group=axis.group, log_name=label)
    elif axis.size > 1:
        message("all_reduce", tensor.nbytes, axis.ranks)
    return tensor


@opaque
def gathered(
    tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None, label: str = ""
) -> torch.Tensor:
    """Return the concatenation of all ranks' slices as a new tensor, without autograd.

    Args:
        dim: sharded dim.
        sizes: size of each rank's slice along `dim`; None: equal sizes.
        label: name of the collective in error reports; empty: a default name.
    """
    if axis.size == 1:
        return tensor.detach().clone()
    sizes = [tensor.shape[dim]] * axis.size if sizes is None else list(sizes)
    longest, padded = max(sizes), tensor.detach().movedim(dim, 0).contiguous()
    if padded.shape[0] < longest:
        padded = torch.cat([padded, padded.new_zeros(longest - padded.shape[0], *padded.shape[1:])])
    every = padded.new_empty(axis.size * longest, *padded.shape[1:])
    if axis.group is not None:
        label = label or f"gather over {axis.name}"
        meet_before(axis, label)
        all_gather_into_tensor(every, padded, group=axis.group, log_name=label)
    else:
        message("all_gather", every.nbytes, axis.ranks)
        if not padded.is_floating_point():  # absent ranks have equal integers
            every.view(axis.size, *padded.shape).copy_(padded)
    if min(sizes) < longest:
        every = torch.cat([every[index * longest : index * longest + size] for index, size in enumerate(sizes)])
    return every.movedim(0, dim).contiguous()


@opaque
def exchanged(tensor: torch.Tensor, axis: Axis, cut: int, join: int, label: str = "") -> torch.Tensor:
    """Exchange slices with an all-to-all, without autograd; returns a new tensor.

    Args:
        cut: dim that is split into one slice for each rank; its size must be a multiple of the number of ranks.
        join: dim along which the received slices are concatenated in rank order.
        label: as in `gathered`.
    """
    if axis.size == 1:
        return tensor.detach().clone()
    cut, join = cut % tensor.dim(), join % tensor.dim()
    parts = tensor.detach().unflatten(cut, (axis.size, -1)).movedim(cut, 0)
    packed = axis.empty(tensor.numel(), tensor.dtype, tensor.device).view(parts.shape).copy_(parts)
    every = torch.empty_like(packed)
    if axis.group is not None:
        label = label or f"all-to-all over {axis.name}"
        meet_before(axis, label)
        all_to_all_single(every, packed, group=axis.group, log_name=label)
    else:
        message("all_to_all", every.nbytes, axis.ranks)
    return every.movedim(0, join).flatten(join, join + 1).contiguous()  # flatten may return a view


@dataclass
class _Slices:
    """Sharding of a dim over the ranks of an axis; arguments as in `gathered`."""

    axis: Axis
    dim: int
    sizes: Sequence[int] | None
    label: str

    def join(self, part: torch.Tensor) -> torch.Tensor:
        return gathered(part, self.axis, self.dim, self.sizes, self.label)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        sizes = [whole.shape[self.dim] // self.axis.size] * self.axis.size if self.sizes is None else list(self.sizes)
        return whole.narrow(self.dim, sum(sizes[: self.axis.rank]), sizes[self.axis.rank]).contiguous()

    def own_of_sum(self, whole: torch.Tensor) -> torch.Tensor:
        return self.own(summed(whole, self.axis, self.label))


def copy_to(tensor: torch.Tensor, axis: Axis, label: str = "") -> torch.Tensor:
    """Return the tensor unchanged; its gradient is summed over the ranks. `label`: as in `gathered`."""
    return _over(axis, tensor, _same, lambda gradient: summed(gradient, axis, label))


def reduce_from(tensor: torch.Tensor, axis: Axis, label: str = "") -> torch.Tensor:
    """Return the sum over the ranks; backward passes the gradient unchanged. `label`: as in `gathered`."""
    return _over(axis, tensor, lambda part: summed(part, axis, label), _same)


def gather_from(
    tensor: torch.Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None, label: str = ""
) -> torch.Tensor:
    """Concatenate the ranks' slices for a computation that is equal on all ranks; arguments as in `gathered`."""
    slices = _Slices(axis, dim, sizes, label)
    return _over(axis, tensor, slices.join, slices.own)


def scatter_to(
    tensor: torch.Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None, label: str = ""
) -> torch.Tensor:
    """Return this rank's slice of a tensor that is equal on all ranks; arguments as in `gathered`."""
    slices = _Slices(axis, dim, sizes, label)
    return _over(axis, tensor, slices.own, slices.join)


def gather_to(
    tensor: torch.Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None, label: str = ""
) -> torch.Tensor:
    """Concatenate the ranks' slices for rank-specific computations, whose gradients backward sums; see `gathered`."""
    slices = _Slices(axis, dim, sizes, label)
    return _over(axis, tensor, slices.join, slices.own_of_sum)


def reduce_scatter(
    tensor: torch.Tensor, axis: Axis, dim: int = -1, sizes: Sequence[int] | None = None, label: str = ""
) -> torch.Tensor:
    """Return this rank's slice of the sum over the ranks; arguments as in `gathered`."""
    slices = _Slices(axis, dim, sizes, label)
    return _over(axis, tensor, slices.own_of_sum, slices.join)


def all_to_all(tensor: torch.Tensor, axis: Axis, cut: int, join: int, label: str = "") -> torch.Tensor:
    """Exchange slices with an all-to-all: split dim `cut`, concatenate along dim `join`; see `exchanged`."""
    there: _Way = lambda part: exchanged(part, axis, cut, join, label)  # noqa: E731
    back: _Way = lambda gradient: exchanged(gradient, axis, join, cut, label)  # noqa: E731
    return _over(axis, tensor, there, back)


_entered: list[torch.Tensor] = []
"""The last copy, referenced here because layers with frozen weights do not save their input."""


@opaque
def enter(tensor: torch.Tensor, axis: Axis, label: str = "") -> torch.Tensor:
    """Apply `copy_to` once for all layers that read one tensor: gradients are added locally and reduced once.

    Later calls with the same unmodified tensor return the same copy as long as the copy exists; a leaf gets a copy at
    each call. With one rank, or without gradients, the tensor itself is returned. `label`: as in `gathered`.
    """
    if axis.size == 1 or not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return enter_once(tensor, axis.ranks, lambda gradient: summed(gradient, axis, label))


def enter_once(tensor: torch.Tensor, ranks: tuple[int, ...], total: _Way) -> torch.Tensor:
    """Return the present copy of an unmodified tensor for a set of ranks, or a new one; `total` sums its gradient."""
    key = (ranks, tensor._version)
    known = getattr(tensor, "_ds_entered", None)
    copy = known[1]() if known is not None and known[0] == key else None
    if copy is not None:
        return copy

    def back(gradient: torch.Tensor) -> torch.Tensor:
        _entered.clear()
        return total(gradient)

    entered: torch.Tensor = _Collective.apply(tensor, _same, back)
    if not tensor.is_leaf:  # a leaf's graph references the leaf, and the copy the graph: a cycle that is never freed
        # A weak reference, since the copy references its base in C++, where the garbage collector finds no cycle.
        tensor._ds_entered = (key, TensorWeakRef(entered))  # type: ignore[attr-defined]
        _entered[:] = [entered]
    return entered
