"""Finds stragglers: the share of message time that a rank waits for each other rank.

A slow backward on one rank shows as waiting in everybody else's next collective. So each wait is charged to the rank
that came last, and to what that rank had more of than the others did.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from deepspeed.foundation.spans import CALL, COPY, DISK, SAVE, STEP, UPDATE, WAIT
from deepspeed.profiling.timeline.segments import COMMUNICATION, MESSAGES, WAITING, RankRecord, Segment, union

_BEFORE_A_SLICE_IS_NEW = (UPDATE, STEP, DISK, COPY, SAVE)  # who gathers one-sidedly waits for nothing else of a peer

_NEVER = 1 << 63


class Charge(NamedTuple):
    """Waiting that one rank caused.

    Attributes:
        rank: that came last.
        nanoseconds: of all others together, in all updates.
        usual: of all others together in the median update, which one odd update does not change.
        category, module: what it had most more of than the others.
        excess: nanoseconds of that category in the median update, over the mean of the others.
    """

    rank: int
    nanoseconds: int
    usual: float
    category: str
    module: str
    excess: float


class Waits:
    """Splits the time in messages into waiting for a rank and the rest.

    Args:
        records: of all ranks.
        pieces: of each, in the same order.
    """

    def __init__(self, records: Sequence[RankRecord], pieces: Sequence[list[Segment]]) -> None:
        self._ranks = [record.rank for record in records]
        self._calls = [_calls(record) for record in records]
        self._busy = [
            {whole: union((p.begin, p.end) for p in of_rank if _is_busy(p, whole)) for whole in (True, False)}
            for of_rank in pieces
        ]
        self._marks = [record.marks for record in records]
        self._caused: dict[int, list[int]] = defaultdict(lambda: [0] * (len(records[0].marks) - 1))  # by position
        self.pieces = [
            [part for piece in of_rank for part in self._split(at, piece)] for at, of_rank in enumerate(pieces)
        ]

    def _split(self, at: int, piece: Segment) -> list[Segment]:
        """A piece in messages as up to two, WAITING and COMMUNICATION."""
        if piece.category not in MESSAGES:
            return [piece]
        rest = piece._replace(category=COMMUNICATION)
        late, until = self._last(at, piece)
        until = min(until, piece.end)
        if late < 0 or until <= piece.begin:
            return [rest]
        self._caused[late][self._update(at, piece)] += until - piece.begin
        waited = piece._replace(category=WAITING, end=until)
        return [waited] if until == piece.end else [waited, rest._replace(begin=until)]

    def _update(self, at: int, piece: Segment) -> int:
        """Number of the update in which a piece begins."""
        return min(bisect_right(self._marks[at], piece.begin), len(self._marks[at]) - 1) - 1

    def _last(self, at: int, piece: Segment) -> tuple[int, int]:
        """Who came last to what a piece waits for, and when; (-1, 0) when nobody is known to be late.

        A call that waits is one that all must enter. What is waited for later has left when the other's call is over.
        """
        if piece.label.startswith("gather of ") and piece.category != CALL:
            return self._busiest(at, piece, whole=False)
        begins, ends = 0, 1
        number = bisect_right(self._calls[at].get(piece.label, []), (piece.begin, _NEVER)) - 1
        late, when, matched = -1, 0, False
        for other, calls in enumerate(self._calls):
            theirs = calls.get(piece.label, [])
            if other != at and 0 <= number < len(theirs):
                matched = True
                came = theirs[number][begins if piece.category == CALL else ends]
                if came > max(when, piece.begin):
                    late, when = other, came
        if late >= 0 or (matched and piece.category == CALL):
            return late, when
        return self._busiest(at, piece, whole=True)

    def _busiest(self, at: int, piece: Segment, whole: bool) -> tuple[int, int]:
        """The peer that was busy for the longest meanwhile, and when that was over."""
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
            if other != at and busy > longest:
                late, longest, when = other, busy, last
        return late, when

    def totals(self, at: int) -> list[dict[tuple[str, str], int]]:
        """Nanoseconds of a rank by category and module, for each update."""
        found: list[dict[tuple[str, str], int]] = [defaultdict(int) for _ in self._marks[at][1:]]
        for piece in self.pieces[at]:
            found[self._update(at, piece)][piece.category, piece.module] += piece.end - piece.begin
        return found

    def charges(self) -> list[Charge]:
        """Waiting by who caused it, the most first."""
        totals = [usual(self.totals(at)) for at in range(len(self.pieces))]
        found = []
        for late, caused in self._caused.items():
            others = [total for at, total in enumerate(totals) if at != late]
            extra: dict[str, dict[str, float]] = defaultdict(dict)
            for category, module in {key for total in totals for key in total if key[0] != WAITING}:
                mean = sum(total.get((category, module), 0.0) for total in others) / len(others)
                extra[category][module] = totals[late].get((category, module), 0.0) - mean
            category = max(extra, key=lambda name: sum(extra[name].values()))
            module = max(extra[category], key=lambda name: extra[category][name])
            excess = sum(extra[category].values())
            found.append(Charge(self._ranks[late], sum(caused), median(caused), category, module, excess))
        return sorted(found, key=lambda charge: -charge.usual)


def usual(updates: Sequence[dict[tuple[str, str], int]]) -> dict[tuple[str, str], float]:
    """The median update's nanoseconds by category and module."""
    return {key: median(update.get(key, 0) for update in updates) for key in {k for update in updates for k in update}}


def _calls(record: RankRecord) -> dict[str, list[tuple[int, int]]]:
    """When each message was begun, and had been, by label."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for span in record.spans:
        if span.category == CALL:
            found[span.label].append((span.begin, span.end))
    return found


def _is_busy(piece: Segment, whole: bool) -> bool:
    return piece.category != WAIT if whole else piece.category in _BEFORE_A_SLICE_IS_NEW
