"""Splits a rank's time into segments; the innermost span counts."""

from __future__ import annotations

from collections.abc import Iterable
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

OUTSIDE = "outside"  # between updates, in no span: the script, and a loader that is not the engine's
COMMUNICATION, WAITING = "communication", "waiting"
MESSAGES = (CALL, WAIT, REDUCE)
CATEGORIES: tuple[str, ...] = (
    FORWARD, BACKWARD, RECOMPUTE, UPDATE, STEP, COMMUNICATION, WAITING, DISK, COPY, LOADER, SAVE, OUTSIDE,
)  # fmt: skip
_BESIDE = (FLIGHT, TRANSFER, COUNT)
_ANYWHERE = (BACKWARD, FORWARD, RECOMPUTE, CALL, WAIT, REDUCE)  # a device's backward runs in threads of its own


class RankRecord(NamedTuple):
    """What one rank recorded.

    Attributes:
        rank: of all.
        spans: by begin, on the clock of rank 0.
        marks: nanoseconds at which an update was over, one more than there are updates.
        main: the thread that called the engine.
        lost: spans that did not fit.
    """

    rank: int
    spans: list[Span]
    marks: list[int]
    main: int
    lost: int


class Segment(NamedTuple):
    """A stretch of time in which one span was the innermost.

    Attributes:
        begin, end: nanoseconds.
        category: of `CATEGORIES`, but CALL, WAIT and REDUCE apart.
        label, module: of the span.
    """

    begin: int
    end: int
    category: str
    label: str
    module: str


def pieces_of(record: RankRecord) -> list[Segment]:
    """All pieces between the first and the last mark, without gaps."""
    start, stop = record.marks[0], record.marks[-1]
    spans = [
        span
        for span in record.spans
        if span.category not in _BESIDE
        and (span.thread == record.main or span.category in _ANYWHERE)
        and span.end > max(span.begin, start)
        and span.begin < stop
    ]
    edges: list[tuple[int, int, int, Span | None]] = [(mark, 0, 0, None) for mark in record.marks]  # pieces end there
    edges += [(span.begin, 1, -span.end, span) for span in spans]
    edges += [(span.end, 0, -span.begin, span) for span in spans]  # what ends makes room first
    edges.sort(key=lambda edge: edge[:3])
    found: list[Segment] = []
    active: list[Span] = []
    at = start
    for moment, begins, _, span in edges:
        until = min(max(moment, start), stop)
        if until > at:
            found.append(_piece(at, until, active))
            at = until
        if span is None:
            continue
        if begins:
            active.append(span)
        else:
            _remove(active, span)
    if stop > at:
        found.append(_piece(at, stop, active))
    return found


def _piece(begin: int, end: int, active: list[Span]) -> Segment:
    if not active:
        return Segment(begin, end, OUTSIDE, "", "")
    inner = active[-1]
    module = inner.module
    if not module and inner.category in (FORWARD, BACKWARD, RECOMPUTE):
        module = next((above.module for above in reversed(active) if above.category == inner.category), "")
    return Segment(begin, end, inner.category, inner.label, module)


def _remove(active: list[Span], span: Span) -> None:
    for at in range(len(active) - 1, -1, -1):
        if active[at] is span:
            del active[at]
            return


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time as disjoint intervals, by begin."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Their sum."""
    return sum(end - begin for begin, end in intervals)


def common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    """Time that lies in both; each disjoint and by begin."""
    total = i = j = 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total
