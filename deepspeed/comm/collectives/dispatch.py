"""Dispatches each public collective to shared memory, to our own algorithms or to the backend.

On CPU sums of fp32, bf16 and fp16 are the fp32 sum in rank order, whichever way they take; what is not named here, and
`async_op`, is the backend's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives.collectives import EXCHANGE, SPREAD, reduce_to_owners, spread, sum_in_rank_order
from deepspeed.comm.process_groups.axis import PUBLIC, Axis, group_axis, tag_of
from deepspeed.comm.shutdown import Phase, released_in
from deepspeed.comm.watchdog import watchdog
from deepspeed.native import KINDS

_SUM = dist.ReduceOp.SUM
# torch's functions by the newest of their names: the older one warns in a newer torch.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_axes: dict[int, tuple[Any, Axis]] = {}  # by process group: the group and its axis


def _route(group: Any, *tensors: torch.Tensor) -> Axis | None:
    """The axis of a group on CPU; None where the backend does everything."""
    for tensor in tensors:
        if not tensor.is_cpu or not tensor.is_contiguous():
            return None
    if group is None:
        group = dist.group.WORLD
    known = _axes.get(id(group))
    if known is None or known[0] is not group:
        if not isinstance(group, dist.ProcessGroup) or "gloo" not in dist.get_backend(group):
            return None
        known = _axes[id(group)] = (group, group_axis("public", group))
    return None if known[1].size == 1 else known[1]


def _tag(axis: Axis, kind: int) -> int:
    """The tag of the axis's next public message; ranks call the collectives of one axis in one order."""
    return tag_of(PUBLIC, kind, axis.next_public())


def _even(numel: int, ranks: int) -> list[int]:
    return [numel * r // ranks for r in range(ranks + 1)]


def all_reduce(tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
    """As torch's; sums over CPU ranks are the fp32 sum in rank order."""
    plain = async_op or not (op is _SUM or op == _SUM) or tensor.dtype not in KINDS
    axis = None if plain else _route(group, tensor)
    if axis is None or (axis.shared is None and axis.size == 2 and tensor.dtype == torch.float32):
        return dist.all_reduce(tensor, op, group, async_op)
    if axis.shared is not None:
        axis.shared.all_reduce(tensor)
        return None
    label = watchdog.current_collective()
    flat, cuts = tensor.detach().view(-1), _even(tensor.numel(), axis.size)
    own = flat[cuts[axis.rank] : cuts[axis.rank + 1]]
    finish = lambda parts: sum_in_rank_order(parts, own, 1.0, add=False)  # noqa: E731
    reduce_to_owners(axis, flat, cuts, _tag(axis, EXCHANGE), label, finish).unrecorded().wait()
    spread(axis, flat, cuts, _tag(axis, SPREAD), label).unrecorded().wait()
    return None


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """As torch's; sums over CPU ranks are the fp32 sum in rank order."""
    plain = async_op or not (op is _SUM or op == _SUM) or input.dtype not in KINDS or output.dtype != input.dtype
    axis = None if plain else _route(group, output, input)
    if axis is None or output.numel() * axis.size != input.numel():
        return _reduce_scatter(output, input, op, group, async_op)
    cuts, flat = _even(input.numel(), axis.size), input.detach().view(-1)
    if axis.shared is not None:
        axis.shared.reduce_scatter(flat, cuts, output)
        return None
    out = output.detach().view(-1)
    finish = lambda parts: sum_in_rank_order(parts, out, 1.0, add=False)  # noqa: E731
    tag = _tag(axis, EXCHANGE)
    reduce_to_owners(axis, flat, cuts, tag, watchdog.current_collective(), finish).unrecorded().wait()
    return None


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """As torch's."""
    axis = None if async_op or output_tensor.dtype != input_tensor.dtype else _route(group, output_tensor, input_tensor)
    if axis is None or input_tensor.numel() * axis.size != output_tensor.numel():
        return _all_gather(output_tensor, input_tensor, group, async_op)
    cuts, full = _even(output_tensor.numel(), axis.size), output_tensor.detach().view(-1)
    if axis.shared is not None:
        axis.shared.all_gather(full, cuts, input_tensor)
        return None
    full[cuts[axis.rank] : cuts[axis.rank + 1]] = input_tensor.detach().view(-1)
    spread(axis, full, cuts, _tag(axis, SPREAD), watchdog.current_collective()).unrecorded().wait()
    return None


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """As torch's; even splits over CPU ranks go as messages, or are read where they lie."""
    even = not (async_op or output_split_sizes or input_split_sizes) and output.dtype == input.dtype
    axis = _route(group, output, input) if even else None
    if axis is None or output.numel() != input.numel() or input.numel() % axis.size:
        return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
    cuts, flat = _even(input.numel(), axis.size), input.detach().view(-1)
    slots = output.detach().view(axis.size, -1)

    def finish(parts: list[torch.Tensor]) -> None:
        for slot, part in zip(slots, parts, strict=True):
            slot.copy_(part)

    reduce_to_owners(axis, flat, cuts, _tag(axis, EXCHANGE), watchdog.current_collective(), finish).unrecorded().wait()
    return None


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """As torch's."""
    axis = None if async_op else _route(group, tensor)
    shared = None if axis is None else axis.shared
    if axis is None or shared is None or (src is None) == (group_src is None):
        return dist.broadcast(tensor, src, group, async_op, group_src)
    ranks = axis.ranks
    if group_src is None and src not in ranks:
        return dist.broadcast(tensor, src, group, async_op)  # its error is the one users know
    shared.broadcast(tensor, ranks.index(src) if group_src is None else group_src)
    return None


@released_in(Phase.ROUTES)
def forget_routes() -> None:
    """The process groups are gone."""
    _axes.clear()
