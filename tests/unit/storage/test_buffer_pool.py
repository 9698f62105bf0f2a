"""The pool of host buffers: aligned, sized as asked, allocated once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import psutil
import pytest
import torch

from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.errors import UsageError
from deepspeed.foundation import log
from deepspeed.storage.buffer_pool import BufferPool


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * 2**20 + 5])
def test_a_buffer_is_aligned_and_at_most_one_block_larger(nbytes):
    pool = BufferPool()
    buffer = pool.take(nbytes)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (nbytes,))
    assert buffer.untyped_storage().data_ptr() % 4096 == 0
    assert buffer.untyped_storage().nbytes() == pool.nbytes <= nbytes + 4096
    pool.put(buffer)


def test_after_the_first_step_nothing_is_allocated():
    pool = BufferPool()
    sizes = [5000, 70_000, 5001, 9000]
    for step in range(4):
        taken = [pool.take(size) for size in sizes]
        for buffer, size in zip(taken, sizes, strict=True):
            assert buffer.numel() == size
            pool.put(buffer.view(torch.uint8)[3:])  # any view names its buffer
        if step == 0:
            settled = (pool.allocations, pool.nbytes)
            assert settled == (4, 8192 + 73728 + 8192 + 12288)
        assert (pool.allocations, pool.nbytes) == settled


def test_lent_buffers_do_not_overlap():
    pool = BufferPool()
    errors: list[int] = []

    def use(mark: int) -> None:
        for _ in range(200):
            buffer = pool.take(20_000).fill_(mark)
            if not bool((buffer == mark).all()):
                errors.append(mark)
            pool.put(buffer)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and pool.allocations <= 4


def test_what_was_not_lent_cannot_be_put_back():
    pool, other = BufferPool(), BufferPool()
    buffer = pool.take(100)
    with pytest.raises(UsageError, match="100 bytes"):
        other.put(buffer)
    pool.put(buffer)
    with pytest.raises(UsageError, match="returned twice"):
        pool.put(buffer)


def test_memory_goes_with_the_pool():
    pool = BufferPool()
    pool.put(pool.take(200 * 2**20).fill_(1))
    held = psutil.Process().memory_info().rss
    del pool
    gc.collect()
    assert psutil.Process().memory_info().rss < held - 190 * 2**20


class RefusingAccelerator:
    """Stands for a device whose driver locks no more pages."""

    def lock_pages(self, tensor: torch.Tensor) -> None:
        raise RuntimeError("out of locked pages")


class LockingAccelerator:
    """Stands for a device: keeps the addresses of what is locked."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def lock_pages(self, tensor: torch.Tensor) -> Callable[[], None]:
        address = tensor.data_ptr()
        self.locked.add(address)
        return lambda: self.locked.remove(address)


@pytest.fixture
def accelerator(monkeypatch):
    """Sets an accelerator for the length of a test."""
    before = get_accelerator()
    monkeypatch.setattr(log, "_said", set())
    yield set_accelerator
    set_accelerator(before)


def test_refused_locking_leaves_pageable_buffers_and_says_so_once(accelerator, capsys):
    accelerator(RefusingAccelerator())
    pool = BufferPool()
    assert pool.take(10).numel() == pool.take(10).numel() == 10
    assert capsys.readouterr().err.count("pageable") == 1


def test_pages_are_locked_where_asked_and_unlocked_before_they_go(accelerator):
    device = LockingAccelerator()
    accelerator(device)
    pool = BufferPool()
    buffer = pool.take(10)
    assert device.locked == {buffer.data_ptr()}
    BufferPool(pin=False).take(10)
    assert device.locked == {buffer.data_ptr()}
    pool.put(buffer)
    del pool, buffer
    gc.collect()
    assert not device.locked


class Copy:
    """A copy that ends when told to, or when it is waited for."""

    def __init__(self):
        self.over, self.waits = False, 0

    def done(self):
        return self.over

    def wait(self):
        self.over, self.waits = True, self.waits + 1


def test_a_loan_ends_at_the_end_of_its_copy():
    pool, copy = BufferPool(pin=False), Copy()
    first = pool.take(100)
    pool.put(first, after=copy)
    second = pool.take(100)
    assert second.data_ptr() != first.data_ptr() and not pool.idle
    copy.over = True
    assert pool.take(100).data_ptr() == first.data_ptr()


def test_a_host_that_runs_ahead_waits_for_the_oldest_copy():
    pool, copies = BufferPool(pin=False), [Copy() for _ in range(20)]
    for copy in copies:
        pool.put(pool.take(100), after=copy)
    assert pool.allocations == 4
    assert [copy.waits for copy in copies] == [1] * 16 + [0] * 4
    pool.shrink()
    assert pool.idle and pool.nbytes == 0 and all(copy.over for copy in copies)
