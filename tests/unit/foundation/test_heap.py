"""What is freed goes back to the system."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch

from deepspeed.comm.shared_memory.allocator import SharedAllocator
from deepspeed.foundation.malloc import HUGE_PAGE, PAGE, at_a_page, huge_pages, in_huge_pages, own_pages, resident

PROGRAM = """
import contextlib, sys, psutil, torch
from deepspeed.foundation.malloc import mapped, own_pages

def resident():
    return psutil.Process().memory_info().rss >> 20

MIB = 1 << 20
for size in (31, 30, 29):  # what glibc learns from: blocks of that size lie in the heap from now on
    torch.ones(size * MIB // 4)
with own_pages() if sys.argv[1] == "own" else contextlib.nullcontext():
    begun = resident()
    kept = []
    for _ in range(8):
        made = mapped if sys.argv[1] == "mapped" else torch.empty
        large = [made((5 * MIB // 4,), dtype=torch.float32).fill_(1) for _ in range(8)]
        kept.append(torch.ones(1 << 16))  # lies behind the last of them, in no older hole, and holds what is below it
    del large
    print(resident() - begun)
"""


def grown(kind: str) -> int:
    """MiB that stay of 40 MiB that were freed, below a few small ones that were not."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_large_blocks_leave_nothing_behind() -> None:
    assert grown("own") < 8 and grown("mapped") < 8
    assert grown("plain") > 24, "the C library gives such memory back by itself: nothing to do"


PLACES = """
import torch
from deepspeed.foundation.malloc import PAGE, at_a_page, own_pages

for numel in (7_654_321, 40_000_000):
    made = at_a_page(numel, torch.bfloat16)
    storage = made.untyped_storage()
    size = storage.nbytes()
    for turn in range(3):
        storage.resize_(0)
        other = torch.ones(1_000_000 + 77 * turn)
        with own_pages():
            storage.resize_(size)
        print(made.data_ptr() % PAGE)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_buffer_begins_with_a_page_again_when_it_is_grown() -> None:
    """Where a disk reads straight into memory, memory that begins elsewhere goes through another block."""
    ran = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["0"] * 6


@pytest.mark.parametrize("numel", [3, 300_000, 1 << 20, 7_654_321])
def test_a_buffer_is_whole_wherever_it_lies(numel: int) -> None:
    made = at_a_page(numel, torch.bfloat16)
    storage = made.untyped_storage()
    size = storage.nbytes()
    assert made.shape == (numel,) and not made.any() and made.data_ptr() % PAGE == 0
    for turn in range(3):
        storage.resize_(0)
        with own_pages():
            storage.resize_(size)
        huge_pages(storage.data_ptr(), size)
        made.fill_(turn)
        assert float(made.float().sum()) == turn * numel


def test_what_nobody_has_written_to_is_not_resident() -> None:
    lent = SharedAllocator().empty(4 << 20, torch.uint8)
    made = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 8 << 20), dtype=np.uint8))
    assert resident([lent, made, None, torch.empty(0), torch.empty(0, device="meta")]) == 0
    made[: 2 << 20] = 1
    assert resident([made, made[5:]]) == 2 << 20  # one storage
    lent.zero_()
    assert resident([lent, made]) == (4 << 20) + (2 << 20)
    assert resident([torch.ones(1000, dtype=torch.uint8)]) == 1000  # no more than it has, of a page


@pytest.mark.parametrize("numel", [1000, HUGE_PAGE + 5])
def test_a_buffer_in_huge_pages_takes_no_more_than_it_has(numel: int) -> None:
    buffer = in_huge_pages(numel, torch.bfloat16)
    assert buffer.shape == (numel,) and not buffer.any() and buffer.untyped_storage().nbytes() == 2 * numel
    buffer.fill_(1.0)
    assert float(buffer.float().sum()) == numel
