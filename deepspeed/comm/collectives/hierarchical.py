"""Hierarchical reduction of low-precision gradients: within each host first, then between hosts in fp32.

[Note: two steps] An all-to-all brings each slice straight to its owner, and nearly all of it comes through the owner's
own network adapter. With `n` ranks, `g` on each of `h` hosts, and `S` bytes in 16 bits, an adapter receives

| way                                          | from other hosts        | 64 ranks, 8 a host | from its own host |
|----------------------------------------------|-------------------------|--------------------|-------------------|
| one all-to-all in 16 bits, fp32 sum at owner | `S (n - g) / n`         | 0.875 S            | `S (g - 1) / n`   |
| a ring in fp32, twice as wide                | `2 S / g * (h - 1) / h` | 0.219 S            | `2 S (n - 1) / n` |
| a ring in 16 bits: partial sums are rounded  | `S / g * (h - 1) / h`   | 0.109 S            | `S (n - 1) / n`   |
| two steps                                    | `2 S / g * (h - 1) / h` | 0.219 S            | `S (g - 1) / g`   |

So two steps send as much over the network as a ring in fp32, half as much within a host, and do not round.
First, each rank receives, from all ranks of its host, the slices of the owners with its local rank on every host, and
sums them in fp32. Then each owner receives one sum from each host. The slices of a host's ranks are contiguous,
so the first step is one all-to-all per host, in one group of calls, without packing. The order of
all sums is the same in every run.

Both steps are launched at once, from a side stream on which the first sum waits for the first message (`aside`):
neither the host nor other computations wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives import collectives
from deepspeed.comm.collectives.collectives import Handle, Scratch, post, sum_in_rank_order
from deepspeed.comm.process_groups.axis import Axis

_all_to_all: Any = dist.all_to_all_single
_together: Any = dist.distributed_c10d._coalescing_manager  # as in torch's batch_isend_irecv


def reduce_to_owners(
    axis: Axis,
    flat: torch.Tensor,
    cuts: Sequence[int],
    tag: int,
    label: str,
    finish: Callable[[list], Handle | None],
    scratch: Scratch = torch.empty_like,
    in_rank_order: bool = False,
) -> Handle:
    """Reduce like `collectives.reduce_to_owners`, but in two steps where possible: within hosts, then between them.

    Two steps need slices of equal length, elements of at most 16 bits and an axis with `hosts`, and are not used with
    `in_rank_order`. After two steps, `finish` gets one fp32 sum per host instead of one contribution per rank.
    """
    hosts = None if in_rank_order or flat.dtype.itemsize > 2 or not axis.is_even(cuts) else axis.hosts
    if hosts is None:
        return collectives.reduce_to_owners(axis, flat, cuts, tag, label, finish, scratch, in_rank_order)
    within, count, share = hosts.within, hosts.count, cuts[1]
    flat = flat[: cuts[-1]]

    sums = torch.empty(share * count, dtype=torch.float32, device=flat.device)
    received = scratch(sums)
    with aside(flat.device):
        sum_within_host(within, count, flat, sums, label)
        alike = [share if position % within.size == within.rank else 0 for position in range(axis.size)]
        works = post(axis, label, lambda: [_all_to_all(received, sums, alike, alike, group=axis.group, async_op=True)])
    pending = [sums]  # until it has been sent

    def arrived() -> Handle | None:
        pending.clear()
        return finish(list(received.split(share)))

    nbytes = flat.nbytes // within.size * (within.size - 1) + sums.nbytes // count * (count - 1)
    return Handle(axis, label, works, arrived, flat, nbytes)


def sum_within_host(within: Axis, count: int, flat: torch.Tensor, sums: torch.Tensor, label: str) -> None:
    """Sum, over the ranks of a host, the slices of the owners with this rank's position on every host.

    The current stream waits for the messages. All ranks of the host must call this, inside of `aside`.

    Args:
        within: ranks of this host.
        count: number of hosts.
        flat: 1-D contribution of this rank, in equal slices for the ranks of all hosts.
        sums: gets the fp32 sums: the slice of this rank's position on the first host, on the second, and so on.
        label: name of the collective in error reports.
    """

    def exchange() -> list[Any]:
        with _together(within.group, flat.device, async_ops=True) as group:
            for out, stretch in zip(table.chunk(count), flat.chunk(count), strict=True):
                _all_to_all(out, stretch, group=within.group, async_op=True)
        return group.works

    table = torch.empty_like(flat)  # by host: the slices from each rank of this host
    collectives.wait_all(within, label, post(within, label, exchange))
    rows = sums.view(count, -1)
    torch.sum(table.view(count, within.size, -1), 1, dtype=torch.float32, out=rows)


def reduce_to_copies(
    axis: Axis,
    copies: Axis,
    flat: torch.Tensor,
    cuts: Sequence[int],
    label: str,
    scale: float,
    finish: Callable[[list], Handle | None],
    in_rank_order: bool = False,
) -> Handle:
    """Sum slices at their owners and then over `copies`, without tags. All ranks of both axes must call this.

    Args:
        axis: ranks among which the slices are divided.
        copies: axis of the ranks that own the same slice; fp32 sums over this axis have equal bits on all its ranks.
        flat: 1-D contribution of this rank; must not change until the handle is done.
        cuts: slice boundaries: rank r of `axis` owns flat[cuts[r] : cuts[r + 1]].
        label: name of the collective in error reports.
        scale: factor on the sum over `axis`.
        finish: called with a list of the final fp32 sum; if `in_rank_order`, with the sums of all replicas instead.
        in_rank_order: sum in rank order instead of the backend's own order.
    """
    total = torch.empty(cuts[axis.rank + 1] - cuts[axis.rank], dtype=torch.float32, device=flat.device)

    def add(parts: list[torch.Tensor]) -> None:
        sum_in_rank_order(parts, total, scale, add=False, any_order=not in_rank_order)

    def send() -> list[Any]:
        if in_rank_order:
            return [dist.all_gather_into_tensor(table, total, group=copies.group, async_op=True)]
        return [dist.all_reduce(table, group=copies.group, async_op=True)]

    table = total.new_empty(total.numel() * copies.size) if in_rank_order else total
    with aside(flat.device):  # `wait` orders this stream, and does not block the host
        reduce_to_owners(axis, flat, cuts, 0, label, add, in_rank_order=in_rank_order).wait()
        across = f"reduce across copies: {label}"
        works = post(copies, across, send)
    nbytes = total.nbytes * (copies.size - 1 if in_rank_order else 1)
    return Handle(copies, across, works, lambda: finish(list(table.split(total.numel()))), total, nbytes)


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Switch to a side stream inside the context, for sums that overlap with the computation.

    The side stream first waits for the current stream. Memory that is allocated inside belongs to the side stream and
    must not be used after the block.
    """
    accelerator, stream = get_accelerator(), _stream(device)
    before = accelerator.current_stream(device)
    if before != stream:
        stream.wait_stream(before)
    with accelerator.stream(stream):
        yield


@cache
def _stream(device: torch.device) -> Any:
    accelerator = get_accelerator()  # a simulation's device may be the CPU, whose streams have no device
    return accelerator.Stream() if device.type == "cpu" else accelerator.Stream(device=device)
