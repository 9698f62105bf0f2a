"""Shared memory between ranks: the bits of its collectives, posts in any order, reuse of memory."""

from __future__ import annotations

import gc
import itertools
import os
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.comm.collectives.collectives import EXCHANGE, SPREAD, Handle, reduce_to_owners, share, sum_in_rank_order
from deepspeed.comm.process_groups.axis import tag_of, world_axis
from deepspeed.comm.shared_memory.allocator import SharedAllocator
from deepspeed.native import library

# Empty, one element, odd, more than one slot, more than all slots of a stream.
SIZES = [1, 7, 1000, 70_001, 600_011]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * rank + numel)
    return (torch.randn(numel, generator=source) * 10.0 ** (rank - 1)).to(dtype)


def rank_order_sum(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    total = contribution(0, numel, dtype).float()
    for rank in range(1, size):
        total = total + contribution(rank, numel, dtype).float()
    return total.to(dtype)


def collectives() -> None:
    rank, size = comm.get_rank(), comm.get_world_size()
    assert (world_axis().shared is None) == (library() is None)  # without it messages give the same bits
    for numel, dtype in itertools.product(SIZES, DTYPES):
        mine, wanted = contribution(rank, numel, dtype), rank_order_sum(size, numel, dtype)
        summed = mine.clone()
        comm.all_reduce(summed)
        assert torch.equal(summed, wanted), (numel, dtype)
        all_mine = contribution(rank, numel * size, dtype)
        out = torch.empty(numel, dtype=dtype)
        comm.reduce_scatter_tensor(out, all_mine)
        assert torch.equal(out, rank_order_sum(size, numel * size, dtype)[rank * numel : (rank + 1) * numel])
        gathered = torch.empty(size, numel, dtype=dtype)
        comm.all_gather_into_tensor(gathered, mine)
        assert all(torch.equal(gathered[r], contribution(r, numel, dtype)) for r in range(size))
    for dtype in (torch.int64, torch.bool, torch.float64):
        sent = (torch.arange(100_003) % 2).to(dtype) if rank == size - 1 else torch.zeros(100_003, dtype=dtype)
        comm.broadcast(sent, src=size - 1)
        assert torch.equal(sent, (torch.arange(100_003) % 2).to(dtype))


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_give_the_fp32_sum_in_rank_order(workers: Any, size: int) -> None:
    workers(size).run(collectives, timeout=120)


def posts_in_different_orders() -> None:
    axis = world_axis("window-test")
    rank, size, numel = axis.rank, axis.size, 30_000
    cuts = [0, 10_000, 10_000, numel] if size == 3 else [0, 9_999, numel]
    own = slice(cuts[rank], cuts[rank + 1])
    channel, results = axis.channel(), {}

    def start(seq: int) -> Handle:
        flat = axis.empty(numel, torch.bfloat16, torch.device("cpu"))
        flat.copy_(contribution(rank, numel + seq, torch.bfloat16)[:numel])
        out = torch.empty(cuts[rank + 1] - cuts[rank])
        results[seq] = out
        finish = lambda parts: sum_in_rank_order(parts, out, 1.0, add=False)  # noqa: E731
        return reduce_to_owners(axis, flat, cuts, tag_of(channel, EXCHANGE, seq), f"round {seq}", finish)

    order = list(range(6)) if rank == 0 else list(range(6))[::-1]
    handles = {seq: start(seq) for seq in order}
    read = [handles[seq].advance() for seq in order]  # rank 0 in one order, the others in the other
    for acknowledged in read:
        if acknowledged is not None:  # None where messages were sent
            acknowledged.wait()
    for seq, out in results.items():
        parts = [contribution(r, numel + seq, torch.bfloat16)[:numel][own] for r in range(size)]
        wanted = torch.empty_like(out)
        sum_in_rank_order(parts, wanted, 1.0, add=False)
        assert torch.equal(out, wanted)
    full = torch.full((numel,), -1.0)
    full[own] = float(rank)
    share(axis, full, cuts, tag_of(channel, SPREAD, 0), "share").wait()
    assert all((full[cuts[r] : cuts[r + 1]] == r).all() for r in range(size))


@pytest.mark.parametrize("size", [2, 3])
def test_posts_are_read_in_any_order(workers: Any, size: int) -> None:
    workers(size).run(posts_in_different_orders)


def test_shared_memory_is_used_again() -> None:
    allocator, regions = SharedAllocator(), []
    for _ in range(2):
        tensors = [allocator.empty(n, torch.float32) for n in (5_000_000, 3, 2_000_000)]
        tensors[1].fill_(1)
        kept = tensors[0][10:20]
        del tensors
        gc.collect()
        again = allocator.empty(2_000_000, torch.float32)  # not over what is still seen through `kept`
        assert again.data_ptr() + again.nbytes <= kept.data_ptr() or kept.data_ptr() + kept.nbytes <= again.data_ptr()
        del kept, again
        gc.collect()
        regions.append(len(allocator.regions))
    assert regions[-1] == regions[0]


def test_a_forked_child_takes_nothing_away() -> None:
    kept = [SharedAllocator().empty(1_000_000, torch.float32).fill_(7)]
    child = os.fork()
    if child == 0:
        kept.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert (kept[0] == 7).all()
