"""Segments of a rank's time, and the split of message time into waiting for a straggler and communication.

Of nested spans, the innermost counts. A slow backward on one rank appears as waiting of all other ranks in the next
collective. So each wait is attributed to the rank that joined the collective last, and to the segment in which that
rank took longer than the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from deepspeed.foundation.spans import (
    BACKWARD,
    CALL,
    COPY,
    COUNT,
    DISK,
    FLIGHT,
    FORWARD,
    LOADER,
    RECOMPUTE,
    REDUCE,
    SAVE,
    STEP,
    TRANSFER,
    UPDATE,
    WAIT,
    Span,
)

OUTSIDE = "outside"  # in no span: the script itself, and a loader that is not the engine's
COMMUNICATION, WAITING = "communication", "waiting"
MESSAGES = (CALL, WAIT, REDUCE)
CATEGORIES: tuple[str, ...] = (
    FORWARD, BACKWARD, RECOMPUTE, UPDATE, STEP, COMMUNICATION, WAITING, DISK, COPY, LOADER, SAVE, OUTSIDE,
)  # fmt: skip
_BESIDE = (FLIGHT, TRANSFER, COUNT)
_ANYWHERE = (BACKWARD, FORWARD, RECOMPUTE, CALL, WAIT, REDUCE)  # backward of a device runs in separate threads


class RankRecord(NamedTuple):
    """Recorded data of one rank.

    Attributes:
        rank: global rank.
        spans: spans sorted by begin, on the clock of rank 0.
        marks: nanoseconds of the start of the first update and of the end of each update.
        main: id of the thread that called the engine.
        lost: number of spans that did not fit into the ring buffer.
    """

    rank: int
    spans: list[Span]
    marks: list[int]
    main: int
    lost: int


class Segment(NamedTuple):
    """Time segment with one innermost span.

    Attributes:
        begin, end: nanoseconds.
        category: one of `CATEGORIES`; CALL, WAIT or REDUCE before `Waits` splits messages.
        label, module: those of the span.
    """

    begin: int
    end: int
    category: str
    label: str
    module: str


def pieces_of(record: RankRecord) -> list[Segment]:
    """Return all segments of a record between its first and its last mark, in order and without gaps."""
    start, stop = record.marks[0], record.marks[-1]
    spans = [
        span
        for span in record.spans
        if span.category not in _BESIDE
        and (span.thread == record.main or span.category in _ANYWHERE)
        and span.end > max(span.begin, start)
        and span.begin < stop
    ]
    edges: list[tuple[int, int, int, Span | None]] = [(mark, 0, 0, None) for mark in record.marks]  # end segments
    edges += [(span.begin, 1, -span.end, span) for span in spans]
    edges += [(span.end, 0, -span.begin, span) for span in spans]  # ends come before begins
    edges.sort(key=lambda edge: edge[:3])
    pieces: list[Segment] = []
    active: list[Span] = []
    position = start
    for moment, begins, _, span in edges:
        until = min(max(moment, start), stop)
        if until > position:
            pieces.append(_piece(position, until, active))
            position = until
        if span is None:
            continue
        if begins:
            active.append(span)
        else:
            del active[max(index for index, other in enumerate(active) if other is span)]
    if stop > position:
        pieces.append(_piece(position, stop, active))
    return pieces


def _piece(begin: int, end: int, active: list[Span]) -> Segment:
    if not active:
        return Segment(begin, end, OUTSIDE, "", "")
    inner = active[-1]
    module = inner.module
    if not module and inner.category in (FORWARD, BACKWARD, RECOMPUTE):
        module = next((above.module for above in reversed(active) if above.category == inner.category), "")
    return Segment(begin, end, inner.category, inner.label, module)


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals into disjoint ones, sorted by begin."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def common(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    """Return the total length in which two lists of disjoint intervals, each sorted by begin, overlap."""
    total = i = j = 0
    while i < len(first) and j < len(second):
        total += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


_BEFORE_A_SLICE_IS_NEW = (UPDATE, STEP, DISK, COPY, SAVE)  # what a one-sided gather waits for

_NEVER = 1 << 63


class Charge(NamedTuple):
    """Waiting that one rank caused.

    Attributes:
        rank: the rank that joined collectives last.
        nanoseconds: waiting of all other ranks together, in all updates.
        usual: nanoseconds of waiting of all other ranks together in the median update.
        category, module: the segment in which the rank exceeded the others most.
        excess: nanoseconds of that category in the median update, above the mean of the others.
    """

    rank: int
    nanoseconds: int
    usual: float
    category: str
    module: str
    excess: float


class Waits:
    """Split of message time into waiting for a rank and communication.

    Args:
        records: records of all ranks.
        pieces: segments of each rank, in the same order.
    """

    def __init__(self, records: Sequence[RankRecord], pieces: Sequence[list[Segment]]) -> None:
        self._ranks = [record.rank for record in records]
        self._calls: list[dict[str, list[tuple[int, int]]]] = []  # begin and end of messages, by label
        for record in records:
            calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
            for span in record.spans:
                if span.category == CALL:
                    calls[span.label].append((span.begin, span.end))
            self._calls.append(calls)
        self._busy = [
            {
                True: union((p.begin, p.end) for p in of_rank if p.category != WAIT),
                False: union((p.begin, p.end) for p in of_rank if p.category in _BEFORE_A_SLICE_IS_NEW),
            }
            for of_rank in pieces
        ]
        self._marks = [record.marks for record in records]
        self._caused: dict[int, list[int]] = defaultdict(lambda: [0] * (len(records[0].marks) - 1))  # by rank position
        self.pieces = [
            [part for piece in of_rank for part in self._split(index, piece)] for index, of_rank in enumerate(pieces)
        ]

    def _split(self, index: int, piece: Segment) -> list[Segment]:
        """Split a message segment into up to two: WAITING and COMMUNICATION."""
        if piece.category not in MESSAGES:
            return [piece]
        rest = piece._replace(category=COMMUNICATION)
        late, until = self._last(index, piece)
        until = min(until, piece.end)
        if late < 0 or until <= piece.begin:
            return [rest]
        self._caused[late][self._update(index, piece)] += until - piece.begin
        waited = piece._replace(category=WAITING, end=until)
        return [waited] if until == piece.end else [waited, rest._replace(begin=until)]

    def _update(self, index: int, piece: Segment) -> int:
        """Return the number of the update in which a segment begins."""
        return min(bisect_right(self._marks[index], piece.begin), len(self._marks[index]) - 1) - 1

    def _last(self, index: int, piece: Segment) -> tuple[int, int]:
        """Return (rank position, time) of the last rank to arrive at the message of a segment; (-1, 0) if none is late.

        A CALL segment is a collective that all ranks enter. The message of a WAIT segment is sent at the
        end of the other rank's call. Without such calls, or if none explains a WAIT, `_busiest` decides.
        """
        if piece.label.startswith("gather of ") and piece.category != CALL:
            return self._busiest(index, piece, whole=False)
        begins, ends = 0, 1
        number = bisect_right(self._calls[index].get(piece.label, []), (piece.begin, _NEVER)) - 1
        late, when, matched = -1, 0, False
        for other, calls in enumerate(self._calls):
            peer_calls = calls.get(piece.label, [])
            if other != index and 0 <= number < len(peer_calls):
                matched = True
                came = peer_calls[number][begins if piece.category == CALL else ends]
                if came > max(when, piece.begin):
                    late, when = other, came
        if late >= 0 or (matched and piece.category == CALL):
            return late, when
        return self._busiest(index, piece, whole=True)

    def _busiest(self, index: int, piece: Segment, whole: bool) -> tuple[int, int]:
        """Return the peer that worked longest during a segment, and the end of its work within the segment.

        The result is (-1, 0) if none worked. `whole`: count all categories but waiting; else only those that delay
        new values of parameters, such as the optimizer update.
        """
        late, longest, when = -1, 0, 0
        for other, of_rank in enumerate(self._busy):
            intervals = of_rank[whole]
            first = max(0, bisect_right(intervals, (piece.begin, 0)) - 1)
            busy = last = 0
            for begin, end in intervals[first:]:
                if begin >= piece.end:
                    break
                overlap = min(end, piece.end) - max(begin, piece.begin)
                if overlap > 0:
                    busy, last = busy + overlap, min(end, piece.end)
            if other != index and busy > longest:
                late, longest, when = other, busy, last
        return late, when

    def totals(self, index: int) -> list[dict[tuple[str, str], int]]:
        """Return the nanoseconds by (category, module) of the rank at position `index`, for each update."""
        totals: list[dict[tuple[str, str], int]] = [defaultdict(int) for _ in self._marks[index][1:]]
        for piece in self.pieces[index]:
            totals[self._update(index, piece)][piece.category, piece.module] += piece.end - piece.begin
        return totals

    def usual(self, index: int) -> dict[tuple[str, str], float]:
        """Return the median nanoseconds of an update by (category, module), for the rank at position `index`."""
        updates = self.totals(index)
        keys = {key for update in updates for key in update}
        return {key: median(update.get(key, 0) for update in updates) for key in keys}

    def charges(self) -> list[Charge]:
        """Return the waiting time that each rank caused to others, sorted by `usual`, largest first."""
        totals = [self.usual(index) for index in range(len(self.pieces))]
        charges = []
        for late, caused in self._caused.items():
            others = [total for index, total in enumerate(totals) if index != late]
            extra: dict[str, dict[str, float]] = defaultdict(dict)
            for category, module in {key for total in totals for key in total if key[0] != WAITING}:
                mean = sum(total.get((category, module), 0.0) for total in others) / len(others)
                extra[category][module] = totals[late].get((category, module), 0.0) - mean
            category = max(extra, key=lambda name: sum(extra[name].values()))
            module = max(extra[category], key=lambda name: extra[category][name])
            excess = sum(extra[category].values())
            charges.append(Charge(self._ranks[late], sum(caused), median(caused), category, module, excess))
        return sorted(charges, key=lambda charge: -charge.usual)
