"""Waiting for other ranks of the machine, with one futex-like bell per process.

[Note: one bell] A process belongs to several groups (shards, replicas, the world), each with its own memory. A rank
that waits in one group may depend on a peer that waits for this rank in another group. So all groups of a process share
one bell (a counter in shared memory), which peers ring whenever they post in any group. A waiting rank receives the
messages of all groups and runs all `workers`, whichever memory it waits in.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from deepspeed.comm.shared_memory.allocator import open_shared, shared_memory
from deepspeed.comm.watchdog import watchdog

NAP_US = 20_000  # microseconds of sleep between two checks that the peers are alive
_BRIEF_NAP_US = 500  # the same while another thread receives the messages, since it does not ring for them
_BELL_BYTES = 4096


class Worker(Protocol):
    """Object with work that peers may wait for."""

    def progress(self) -> None:
        """Do all work that needs no waiting."""


class GroupSharedMemory(Protocol):
    """Shared memory of one group, as the waiting loop uses it."""

    alive: Alive

    def bell_count(self) -> int:
        """Return the number of rings of this process's bell."""
        ...

    def nap(self, seen: int, microseconds: int) -> None:
        """Sleep until the bell has rung more than `seen` times, at most for `microseconds`."""
        ...

    def drain(self) -> bool:
        """Receive the messages that have arrived; returns False if another thread is doing so."""
        ...


class Groups:
    """Shared memories of this process's groups, and the workers that run during waits."""

    def __init__(self) -> None:
        self.memories: list[GroupSharedMemory] = []
        self.workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._working = threading.RLock()
        self._bell: tuple[int, int, mmap.mmap] | None = None  # process, descriptor, memory
        self._bells: dict[tuple[int, int], mmap.mmap] = {}  # those of other processes

    def bell(self) -> tuple[int, mmap.mmap]:
        """Return the bell of this process as (descriptor, memory), created at the first call."""
        if self._bell is None or self._bell[0] != os.getpid():
            self._bell = (os.getpid(), *shared_memory(_BELL_BYTES))
        return self._bell[1:]

    def bell_of(self, process: int, descriptor: int) -> mmap.mmap:
        """Return the bell of another process, mapped once; raises OSError if the process ended or is not visible."""
        if (process, descriptor) not in self._bells:
            self._bells[process, descriptor] = open_shared(process, descriptor, _BELL_BYTES)
        return self._bells[process, descriptor]

    def forget(self) -> None:
        """Close this process's bell and drop all memories and bells after the groups are destroyed."""
        self.memories.clear()
        self._bells.clear()
        if self._bell is not None:
            os.close(self._bell[1])
            self._bell = None

    def drain(self) -> bool:
        """Receive the messages of all groups; returns False if another thread is doing so for one of them."""
        return all([memory.drain() for memory in self.memories])

    def work(self) -> None:
        """Run the workers unless another thread runs them; nested waits of this thread also run the workers."""
        if self._working.acquire(blocking=False):
            try:
                for worker in list(self.workers):
                    worker.progress()
            finally:
                self._working.release()

    def until(self, memory: GroupSharedMemory, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait in `memory` until `ready()` is true and run the workers meanwhile.

        Returns:
            True, or False at the deadline (a time of `time.monotonic`).

        Raises:
            RuntimeError: a peer or the group has ended.
            CommError: another rank has reported a failure.
        """
        while True:
            seen = memory.bell_count()
            drained = memory.drain()
            if ready():
                return True
            drained = self.drain() and drained
            self.work()
            if ready():
                return True
            now = time.monotonic()
            if now >= deadline:
                return False
            memory.alive.check()
            watchdog.here.raise_if_alarmed()
            memory.nap(seen, min(NAP_US if drained else _BRIEF_NAP_US, int((deadline - now) * 1e6) + 1))


groups = Groups()


class Until:
    """Handle of an operation in `memory`; complete once the condition `comes_true()` is true."""

    def __init__(self, memory: GroupSharedMemory, comes_true: Callable[[], bool]) -> None:
        self._memory, self._comes_true = memory, comes_true
        self._is_true = False

    def ready(self) -> bool:
        """Check the condition once, without waiting; returns whether it is true or was at an earlier call."""
        self._is_true = self._is_true or self._comes_true()
        return self._is_true

    def within(self, seconds: float) -> bool:
        """Wait up to `seconds` (0: do not wait); returns whether the operation is complete. Errors as in `wait`."""
        if seconds == 0:
            return self.ready()
        return groups.until(self._memory, self.ready, time.monotonic() + seconds)

    def wait(self) -> None:
        """Block until the condition is true.

        Raises:
            RuntimeError: the watchdog's timeout is exceeded, or a peer or the group has ended.
            CommError: another rank has reported a failure.
        """
        limit = watchdog.timeout().total_seconds()
        if not groups.until(self._memory, self.ready, time.monotonic() + limit):
            raise RuntimeError(f"timed out after {limit:g} s")


class Alive:
    """Check that a group was not destroyed and that its other processes (ids `processes`) are running."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._closed = False
        self._poll, self._of = select.poll(), {}
        for process in processes:
            with suppress(OSError, AttributeError):  # on an older system only the watchdog notices, later
                descriptor = os.pidfd_open(process)
                self._of[descriptor] = process
                self._poll.register(descriptor, select.POLLIN)

    def check(self, ended: bool = True) -> None:
        """Raise RuntimeError if the group was destroyed or, unless `ended` is False, a process has ended."""
        if self._closed:
            raise RuntimeError("connection closed: the process group was destroyed")
        for descriptor, _ in self._poll.poll(0) if ended else ():
            raise RuntimeError(f"connection closed: process {self._of[descriptor]} of another rank has ended")

    def close(self) -> None:
        self._closed = True
        for descriptor in self._of:
            self._poll.unregister(descriptor)
            os.close(descriptor)
        self._of.clear()
