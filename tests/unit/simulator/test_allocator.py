"""The caching allocator's rule: rounding, splitting, joining, streams, and what stays reserved."""

from __future__ import annotations

import pytest

from deepspeed.errors import ArgumentError
from deepspeed.simulator.allocator import CachingAllocator, replay_memory
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.trace import EMPTIED, KERNEL, HostEvent, MemoryEvent, Recording

MIB = 1 << 20


def test_small_ones_share_segments_of_two_mebibytes() -> None:
    memory = CachingAllocator()
    pieces = [memory.take(100, 0) for _ in range(4096)]
    assert memory.allocated == 4096 * 512 == memory.reserved == 2 * MIB
    memory.take(1, 0)
    assert memory.reserved == 4 * MIB
    for piece in pieces:
        memory.give(piece)
    assert memory.allocated == 512 and memory.reserved == 4 * MIB


def test_large_ones_are_cut_from_larger_segments_and_joined_again() -> None:
    memory = CachingAllocator()
    pieces = [memory.take(5 * MIB, 0) for _ in range(4)]
    assert memory.reserved == 20 * MIB
    for piece in (pieces[1], pieces[3], pieces[2], pieces[0]):  # joins on either side
        memory.give(piece)
    memory.take(20 * MIB, 0)
    assert memory.reserved == 20 * MIB


def test_what_does_not_join_is_not_used() -> None:
    memory = CachingAllocator()
    pieces = [memory.take(5 * MIB, 0) for _ in range(4)]
    memory.give(pieces[0])
    memory.give(pieces[2])
    memory.take(10 * MIB, 0)
    assert memory.reserved == 30 * MIB


def test_the_smallest_that_fits_and_a_rest_that_is_worth_it() -> None:
    memory = CachingAllocator()
    large, small = memory.take(64 * MIB, 0), memory.take(32 * MIB, 0)
    memory.give(large)
    memory.give(small)
    taken = memory.take(31 * MIB, 0)  # leaves less than a mebibyte and more would be needed for a block of its own
    assert taken.size == 32 * MIB and taken.after is None
    assert memory.take(60 * MIB, 0).after is not None and memory.reserved == 96 * MIB


def test_streams_do_not_share() -> None:
    memory = CachingAllocator()
    memory.give(memory.take(64 * MIB, 0))
    memory.take(64 * MIB, 1)
    assert memory.reserved == 128 * MIB


def test_a_full_device_gives_its_cache_back_first() -> None:
    memory = CachingAllocator(limit=100 * MIB)
    memory.give(memory.take(64 * MIB, 0))
    memory.take(80 * MIB, 0)
    assert memory.reserved == 80 * MIB
    with pytest.raises(ArgumentError, match="out of memory"):
        memory.take(40 * MIB, 0)


def test_a_block_that_another_stream_uses_is_free_when_that_stream_is_done() -> None:
    card = Machine(8, 1, {"fp32": [[0, 1e12]]}, 1e12, 0.0, 1e11, launch=1e-6)
    entries = [HostEvent(KERNEL, "mm", 1, 1e12), HostEvent(KERNEL, "mm", 0, 1e6), HostEvent(KERNEL, "mm", 0, 1e6)]
    first = [MemoryEvent(0, 1, 64 * MIB, 0)]
    used = [MemoryEvent(1, 1, 64 * MIB, 1, used=True)]
    rest = [MemoryEvent(2, 1, 0, 0), MemoryEvent(3, 2, 64 * MIB, 0)]
    alone = replay_memory(Recording("case", 0, 1, entries, first + rest), card, [3])
    shared = replay_memory(Recording("case", 0, 1, entries, first + used + rest), card, [3])
    assert alone.reserved == 64 * MIB and shared.reserved == 128 * MIB
    assert alone.ratio == 1.0 and shared.by_step == [(128 * MIB, 128 * MIB)]


def test_an_emptied_cache_reserves_nothing() -> None:
    card = Machine(8, 1, {"fp32": [[0, 1e12]]}, 1e12, 0.0, 1e11, launch=1e-6)
    blocks = [
        MemoryEvent(0, 1, 64 * MIB, 0),
        MemoryEvent(0, 1, 0, 0),
        MemoryEvent(0, EMPTIED, 0, 0),
        MemoryEvent(0, 2, 80 * MIB, 0),
    ]
    assert replay_memory(Recording("case", 0, 1, [], blocks), card, []).reserved == 80 * MIB
