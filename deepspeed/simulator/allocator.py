"""Simulation of torch's caching allocator for a run's allocations: reserved memory and fragmentation.

[Note: the rule] Sizes are rounded up to 512 bytes. Blocks up to 1 MiB are cut from segments of 2 MiB, blocks below 10
MiB from segments of 20 MiB; larger blocks get a segment of their own size, rounded up to 2 MiB. A request takes the
smallest sufficient free block of its stream and kind, and splits off the remainder if that is large enough. Adjacent
free blocks are merged. A block used by another stream (`record_stream`) is free once that stream has finished. Segments
stay reserved until the cache is emptied or memory runs out; then free segments are released and the request is retried.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from deepspeed.errors import ArgumentError
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.replay import SimulatedTimeline, replay
from deepspeed.simulator.trace import EMPTIED, MemoryEvent, Recording

_ROUND, _SMALL, _LARGE = 512, 1 << 20, 10 << 20
_SMALL_SEGMENT, _LARGE_SEGMENT, _ROUND_SEGMENT = 2 << 20, 20 << 20, 2 << 20


class _Piece:
    """Part of a segment, free or allocated."""

    __slots__ = ("after", "before", "free", "place", "pool", "segment", "size")

    def __init__(self, segment: int, place: int, size: int, pool: tuple[int, bool]) -> None:
        self.segment, self.place, self.size, self.pool, self.free = segment, place, size, pool, True
        self.before: _Piece | None = None
        self.after: _Piece | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Return the sort key: smallest first, then lowest address."""
        return self.size, self.segment, self.place


class CachingAllocator:
    """Caching allocator with torch's rule; see the note of the module.

    Args:
        limit: bytes of device memory.

    Attributes:
        allocated, reserved: current bytes; `most_allocated`, `most_reserved`: their maxima so far.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._free: dict[tuple[int, bool], list[tuple[tuple[int, int, int], _Piece]]] = {}
        self._segments = 0

    def take(self, nbytes: int, stream: int) -> _Piece:
        """Allocate a block of `nbytes` bytes for a stream; `give` frees the returned block.

        Raises:
            ArgumentError: the device is out of memory.
        """
        size = -(-max(nbytes, 1) // _ROUND) * _ROUND
        small = size <= _SMALL
        pool = (stream, small)
        piece = self._found(pool, size) or self._reserve(pool, size)
        rest = piece.size - size
        if rest >= (_ROUND if small else _SMALL + 1):
            left = _Piece(piece.segment, piece.place + size, rest, pool)
            left.before, left.after, piece.after = piece, piece.after, left
            if left.after is not None:
                left.after.before = left
            piece.size = size
            self._keep(left)
        piece.free = False
        self.allocated += piece.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return piece

    def give(self, piece: _Piece) -> None:
        self.allocated -= piece.size
        piece.free = True
        for other in (piece.after, piece.before):
            if other is not None and other.free:
                self._forget(other)
                piece = self._join(*sorted((piece, other), key=lambda each: each.place))
        self._keep(piece)

    def empty(self) -> None:
        """Release segments without allocated blocks to the device."""
        for pool, free_pieces in self._free.items():
            whole = [piece for _, piece in free_pieces if piece.before is None and piece.after is None]
            self.reserved -= sum(piece.size for piece in whole)
            gone = {id(piece) for piece in whole}
            self._free[pool] = [entry for entry in free_pieces if id(entry[1]) not in gone]

    def _found(self, pool: tuple[int, bool], size: int) -> _Piece | None:
        free_pieces = self._free.setdefault(pool, [])
        index = bisect.bisect_left(free_pieces, (size, -1, -1), key=lambda entry: entry[0])
        return free_pieces.pop(index)[1] if index < len(free_pieces) else None

    def _reserve(self, pool: tuple[int, bool], size: int) -> _Piece:
        if pool[1]:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        if self.reserved + segment > self.limit:
            self.empty()
        if self.reserved + segment > self.limit:
            raise ArgumentError(
                f"out of memory: {segment / 2**30:.2f} GiB more than the {self.reserved / 2**30:.2f} GiB reserved (of "
                f"which {self.allocated / 2**30:.2f} GiB in use) are over the device's {self.limit / 2**30:.2f} GiB"
            )
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._segments += 1
        return _Piece(self._segments, 0, segment, pool)

    def _keep(self, piece: _Piece) -> None:
        bisect.insort(self._free.setdefault(piece.pool, []), (piece.key, piece), key=lambda entry: entry[0])

    def _forget(self, piece: _Piece) -> None:
        free_pieces = self._free[piece.pool]
        free_pieces.pop(bisect.bisect_left(free_pieces, piece.key, key=lambda entry: entry[0]))

    @staticmethod
    def _join(left: _Piece, right: _Piece) -> _Piece:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left


@dataclass(frozen=True)
class Held:
    """Peak device memory of a run.

    Args:
        allocated: peak bytes in use.
        reserved: peak bytes reserved from the device.
        by_step: (allocated, reserved) peaks up to the end of each step.
    """

    allocated: int
    reserved: int
    by_step: list[tuple[int, int]]

    @property
    def ratio(self) -> float:
        """Return reserved over allocated bytes, at their peaks."""
        return self.reserved / max(1, self.allocated)


def replay_memory(recording: Recording, machine: Machine, ends: list[int], limit: float = float("inf")) -> Held:
    """Simulate the allocations of a recording of several steps.

    Args:
        recording: recording with all memory events since the first allocation.
        machine: machine for the simulated times at which streams finish with a block.
        ends: number of recorded entries at the end of each step.
        limit: bytes of device memory.

    Raises:
        ArgumentError: the device has too little memory.
    """
    allocator, time = CachingAllocator(limit), _Times(recording, replay(recording, machine))
    held: dict[int, _Piece] = {}
    users: dict[int, set[int]] = {}
    waiting: list[tuple[float, _Piece]] = []
    by_step: list[tuple[int, int]] = []
    for block in recording.blocks:
        while len(by_step) < len(ends) and block.position > ends[len(by_step)]:
            by_step.append((allocator.most_allocated, allocator.most_reserved))
        if block.used:
            users.setdefault(block.number, set()).add(block.stream)
            continue
        for end, piece in [each for each in waiting if each[0] <= time.of_host(block)]:
            allocator.give(piece)
            waiting.remove((end, piece))
        if block.number == EMPTIED:
            allocator.empty()
            continue
        old = held.pop(block.number, None)
        if block.nbytes:
            held[block.number] = allocator.take(block.nbytes, block.stream)
        if old is not None:
            others = users.pop(block.number, set())
            done = max((time.of_stream(stream, block) for stream in others), default=0.0)
            waiting.append((done, old)) if done > time.of_host(block) else allocator.give(old)
    by_step += [(allocator.most_allocated, allocator.most_reserved)] * (len(ends) - len(by_step))
    return Held(allocator.most_allocated, allocator.most_reserved, by_step)


class _Times:
    """Times at which the host reaches a memory event, and at which streams finish the work before it."""

    def __init__(self, recording: Recording, timeline: SimulatedTimeline) -> None:
        self._timeline = timeline
        self._on: dict[int, list[int]] = {}
        for number, entry in enumerate(recording.entries):
            self._on.setdefault(entry.stream, []).append(number)

    def of_host(self, block: MemoryEvent) -> float:
        return self._timeline.clocks[block.position - 1] if block.position else 0.0

    def of_stream(self, stream: int, block: MemoryEvent) -> float:
        entries = self._on.get(stream, [])
        index = bisect.bisect_left(entries, block.position)
        return self._timeline.ends[entries[index - 1]] if index else 0.0
