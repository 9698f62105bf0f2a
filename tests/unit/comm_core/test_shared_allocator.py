"""The allocator of shared memory: no block has two owners, whoever frees it and whenever."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from deepspeed.comm.shared_memory.allocator import SharedAllocator


class Knot:
    """Something that only a collection frees, with a tensor in it."""

    def __init__(self, tensor: torch.Tensor, mark: int) -> None:
        self.tensor, self.mark, self.itself = tensor, mark, self


class Heir(Knot):
    """A knot whose end asks for memory, as a client's destructor may."""

    def __init__(self, tensor: torch.Tensor, mark: int, allocator: SharedAllocator) -> None:
        super().__init__(tensor, mark)
        self._allocator = allocator

    def __del__(self) -> None:
        self._allocator.empty(700, torch.int64).fill_(-self.mark)


@contextmanager
def eager_collections() -> Iterator[None]:
    before, turns = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(3, 2, 2)
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(turns)
        gc.collect()


def overwritten(allocator: SharedAllocator, count: int, seed: int) -> int:
    """How many of `count` tensors do not hold at their end what was written at their start."""
    source, alive, wrong = random.Random(seed), [], 0
    for step in range(count):
        mark = seed * 10_000_000 + step + 1
        tensor = allocator.empty(source.choice([1, 500, 513, 3000, 40_000]), torch.int64).fill_(mark)
        alive.append(Heir(tensor, mark, allocator) if step % 50 == 0 else Knot(tensor, mark))
        while len(alive) > source.choice([5, 40]):
            knot = alive.pop(source.randrange(len(alive)))
            wrong += not bool((knot.tensor == knot.mark).all())
    return wrong + sum(not bool((knot.tensor == knot.mark).all()) for knot in alive)


def stress(threads: int, count: int) -> int:
    allocator, found = SharedAllocator(), [0] * threads

    def work(index: int) -> None:
        found[index] = overwritten(allocator, count, index)

    with eager_collections():
        working = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        for thread in working:
            thread.start()
        for thread in working:
            thread.join()
    return sum(found)


@pytest.mark.parametrize("threads", [1, 4])
def test_no_block_is_handed_out_twice(threads: int) -> None:
    assert stress(threads, 3000 // threads) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "count"), [(1, 30_000), (2, 30_000), (8, 10_000)])
def test_no_block_is_handed_out_twice_at_length(threads: int, count: int) -> None:
    assert stress(threads, count) == 0


def test_what_was_freed_is_whole_again() -> None:
    allocator = SharedAllocator()
    with eager_collections():
        overwritten(allocator, 500, 1)
    gc.collect()
    before = [region.nbytes for region in allocator.regions]
    whole = [allocator.empty(nbytes, torch.uint8) for nbytes in before]
    assert [region.nbytes for region in allocator.regions] == before and None not in map(allocator.place, whole)


def test_a_forked_child_has_memory_of_its_own() -> None:
    allocator = SharedAllocator()
    kept = allocator.empty(1000, torch.int64).fill_(1)
    freed = allocator.empty(1000, torch.int64)
    child = os.fork()
    if child == 0:
        del freed
        mine = [allocator.empty(1000, torch.int64).fill_(5) for _ in range(3)]
        os._exit(0 if all(allocator.place(each) is None for each in mine) and bool((kept == 1).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    mine = allocator.empty(1000, torch.int64).fill_(2)
    assert bool((kept == 1).all()) and bool((mine == 2).all())
