"""Timeline of all ranks over some updates: shares of the step, stragglers, the limiting resource."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.foundation.spans import FLIGHT, TRANSFER
from deepspeed.profiling.timeline.report import ADVICE, draw, table, trace
from deepspeed.profiling.timeline.segments import (
    CATEGORIES,
    COMMUNICATION,
    WAITING,
    Charge,
    RankRecord,
    Segment,
    Waits,
    common,
    pieces_of,
    union,
)

_MUCH = 0.05  # fraction of the step spent waiting for one rank, from which that rank is the limit


class Limit(NamedTuple):
    """Bottleneck of a step.

    Attributes:
        category: one of `CATEGORIES`.
        module: module or group of parameters; may be empty.
        rank: the rank that others wait for; None: the limit applies to all ranks.
        share: fraction of the step's time.
        advice: suggested change of the configuration.
    """

    category: str
    module: str
    rank: int | None
    share: float
    advice: str


class Timeline:
    """Spans of all ranks over consecutive updates.

    Args:
        records: records of all ranks, on one clock.
        first: number of the first update, counted from 0.
    """

    def __init__(self, records: Sequence[RankRecord], first: int = 0) -> None:
        self.records, self.first = list(records), first
        self.updates = len(self.records[0].marks) - 1
        self._waits = Waits(self.records, [pieces_of(record) for record in self.records])

    @property
    def pieces(self) -> list[list[Segment]]:
        """Return each rank's segments without gaps; messages are split into WAITING and COMMUNICATION."""
        return self._waits.pieces

    @property
    def step_seconds(self) -> float:
        """Return the mean seconds of an update, over updates and ranks."""
        spans = [record.marks[-1] - record.marks[0] for record in self.records]
        return sum(spans) / len(spans) / self.updates / 1e9

    def shares(self, rank: int | None = None) -> dict[str, float]:
        """Return the seconds of an update by category; categories are exclusive and sum to the step.

        Args:
            rank: a rank; None: the mean of all ranks.
        """
        chosen = [of for record, of in zip(self.records, self.pieces, strict=True) if rank in (None, record.rank)]
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for piece in (piece for of_rank in chosen for piece in of_rank):
            seconds[piece.category] += (piece.end - piece.begin) / 1e9 / self.updates / len(chosen)
        return seconds

    def modules(self, category: str) -> dict[str, float]:
        """Return the seconds of an update in a category by module, as the mean of all ranks, largest first."""
        seconds: dict[str, float] = defaultdict(float)
        for piece in (piece for of_rank in self.pieces for piece in of_rank if piece.category == category):
            seconds[piece.module] += (piece.end - piece.begin) / 1e9 / self.updates / len(self.records)
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    @property
    def exposed(self) -> float:
        """Return the seconds of an update in which a rank only communicates or waits for another; mean of all ranks."""
        shares = self.shares()
        return shares[COMMUNICATION] + shares[WAITING]

    def beside(self, category: str = FLIGHT) -> tuple[float, float]:
        """Return (seconds of an update with messages or transfers pending, the part beside other work); mean of ranks.

        Args:
            category: FLIGHT for messages, TRANSFER for the disk.
        """
        total = hidden = 0
        for record, pieces in zip(self.records, self.pieces, strict=True):
            low, high = record.marks[0], record.marks[-1]
            flying = union(
                (max(s.begin, low), min(s.end, high)) for s in record.spans if s.category == category and s.end > low
            )
            bare = union((p.begin, p.end) for p in pieces if p.category in (COMMUNICATION, WAITING))
            flying_time = sum(end - begin for begin, end in flying)
            total += flying_time
            hidden += flying_time - common(flying, bare)
        scale = 1e9 * self.updates * len(self.records)
        return total / scale, hidden / scale

    def received(self) -> dict[str, int]:
        """Return the bytes that all ranks received from ranks, or moved from and to disks, in all updates, by label."""
        bytes_by_source: dict[str, int] = defaultdict(int)
        for record in self.records:
            for span in record.spans:
                if span.category in (FLIGHT, TRANSFER) and record.marks[0] <= span.end <= record.marks[-1]:
                    bytes_by_source[span.label.partition(" ")[0]] += span.nbytes
        return dict(bytes_by_source)

    @cached_property
    def charges(self) -> list[Charge]:
        """Return the waiting by causing rank, the largest `usual` first."""
        return self._waits.charges()

    @cached_property
    def limit(self) -> Limit:
        """Return the median update's bottleneck: a rank that others wait for, or the category longest on all ranks."""
        totals = [self._waits.usual(index) for index in range(len(self.records))]
        whole = sum(sum(total.values()) for total in totals) / len(totals)
        by_rank: list[dict[str, float]] = [defaultdict(float) for _ in totals]
        for sums, total in zip(by_rank, totals, strict=True):
            for (name, _), nanoseconds in total.items():
                sums[name] += nanoseconds
        everywhere = {name: min(sums[name] for sums in by_rank) for name in CATEGORIES if name != WAITING}
        category = max(everywhere, key=lambda name: everywhere[name])
        if self.charges:
            worst, others = self.charges[0], len(self.records) - 1
            lost = worst.usual / others
            if lost > max(_MUCH * whole, everywhere[category]) and worst.excess > lost / 2:
                return Limit(worst.category, worst.module, worst.rank, lost / whole, ADVICE[worst.category])
        by_module: dict[str, float] = defaultdict(float)
        for (name, module), nanoseconds in (item for total in totals for item in total.items()):
            if name == category:
                by_module[module] += nanoseconds / len(totals)
        share = sum(by_module.values()) / whole
        return Limit(category, max(by_module, key=lambda name: by_module[name]), None, share, ADVICE[category])

    # -- as files ---------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Return a table: shares by category and rank, messages in flight, waiting by causing rank, and the limit."""
        return table(self)

    def chrome(self) -> dict[str, Any]:
        """Return the trace for Perfetto and chrome://tracing: a process per rank, a track per thread."""
        return trace(self)

    def picture(self, path: str | Path) -> None:
        """Write a picture of the last update; the suffix of `path` determines the format.

        Raises:
            NotAvailableError: matplotlib is not installed.
        """
        draw(self, path)
