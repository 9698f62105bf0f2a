"""Comparison of numbers over the ranks that share a group, before gradients are used.

`accumulation.AccumulationWindow.row` returns a rank's numbers for its window. For each group, the row continues with
the number of rounds sent, the factor of low-precision rounds, and a flag for each parameter with a gradient.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.collectives import SMALL
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.zero.gradients.accumulation import AccumulationWindow, Purpose, disagreement
from deepspeed.zero.gradients.buckets import Bucket, BucketRow, ReductionRound
from deepspeed.zero.parameters.collective_order import LaunchOrder
from deepspeed.zero.parameters.parallel_groups import ParallelGroups
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import group_of


@dataclass(eq=False)
class RankComparison:
    """Ranks that have the same parameters, and the buckets whose rows they compare."""

    axis: Axis
    channel: int
    buckets: list[Bucket] = field(default_factory=list)
    count: int = 0
    order: LaunchOrder | None = None
    sent: bytes = b""  # the row of the buckets that this rank sent last
    as_of: int = -1  # the reducer's revision then
    _known: tuple[int, list[bytes]] | None = None

    def put_in_order(self, depart: Callable[[Bucket, ReductionRound, int], None]) -> None:
        """Launch rounds in a fixed order if messages have no tags."""
        untagged = [
            bucket
            for bucket in self.buckets
            if any(not axis.tagged and axis.group is not None for axis in bucket.group.ranks.summing)
        ]
        # Backward goes through the model from its end, and a group is complete with the first of its parameters.
        untagged.sort(key=lambda bucket: min(member.place for member in bucket.group.members), reverse=True)
        if untagged:
            self.order = LaunchOrder(untagged, depart)
        for bucket in untagged:
            bucket.order = self.order

    def knows(self, rows: Rows, revision: int) -> bool:
        """Return whether nothing has changed on any rank since the last `learn`."""
        return self._known == (revision, rows.tails)

    def learn(self, rows: Rows, revision: int) -> None:
        """Record that the ranks agree on these rows, at this revision of this rank's gradients."""
        self._known = (revision, rows.tails)

    def tag(self) -> int:
        self.count += 1
        return tag_of(self.channel, SMALL, self.count)


class Rows(NamedTuple):
    """Rows of all ranks, in rank order."""

    heads: list[list[float]]  # of the window
    tails: list[bytes]  # of the buckets, one after the other

    @property
    def equal(self) -> bool:
        """Return whether all rows of the buckets are equal."""
        return all(tail == self.tails[0] for tail in self.tails)

    def by_bucket(self, buckets: Sequence[Bucket]) -> Iterator[list[BucketRow]]:
        """Yield the rows of all ranks for each bucket."""
        offset = 0
        for bucket in buckets:
            size = bucket.row_bytes
            yield [BucketRow.unpack(tail[offset : offset + size], len(bucket.touched)) for tail in self.tails]
            offset += size

    def mismatch(self, buckets: Sequence[Bucket]) -> str | None:
        """Describe a difference that zero rounds cannot compensate; None if there is none."""
        if self.equal:
            return None
        for bucket, table in zip(buckets, self.by_bucket(buckets), strict=True):
            launches, factors = [row.launches for row in table], {row.factor for row in table} - {0.0}
            frozen = [rank for rank, counts in enumerate(launches) if counts[0] < 0]
            if frozen and any(max(counts) > 0 for counts in launches):
                return f"{bucket.group.name} is trained on some ranks, and frozen on rank {', '.join(map(str, frozen))}"
            mixed = any(factor < 0 for factor in factors) and len({counts[0] for counts in launches}) > 1
            if len(factors) > 1 or mixed:
                return (
                    f"gradients of {bucket.group.name} that travel in low precision are multiplied by other factors on "
                    f"other ranks: their backward passes differ (num_items, scale_wrt_gas, loss scale)"
                )
        return None


class GradAgreement:
    """Compares the windows and buckets of an engine's ranks before gradients are used."""

    def __init__(
        self, axes: ParallelGroups, buckets: Sequence[Bucket], window: AccumulationWindow, device: torch.device
    ) -> None:
        self._window, self._device = window, device
        self._gather_order = next((b.group.gather_order for b in buckets if b.group.gather_order is not None), None)
        # Ranks agree on a group with all that have its parameters, and all meet on their axes in one order.
        where = {axes.dp_sp_group, *(bucket.group.ranks.everyone for bucket in buckets)}
        self._meetings = [RankComparison(axis, axis.channel()) for axis in sorted(where, key=lambda axis: axis.ranks)]
        for bucket in buckets:
            next(m for m in self._meetings if m.axis is bucket.group.ranks.everyone).buckets.append(bucket)
        apart = axes.everyone is not axes.dp_sp_group
        self._everyone = RankComparison(axes.everyone, axes.everyone.channel()) if apart else None

    def meetings(self, of: ParamRecord | None = None) -> list[RankComparison]:
        """Return all comparisons, or that of the ranks that have a parameter."""
        if of is None:
            return self._meetings
        return [meeting for meeting in self._meetings if meeting.axis is group_of(of).ranks.everyone]

    def exchange(
        self,
        meeting: RankComparison,
        purpose: Purpose,
        of: ParamRecord | None,
        edits: int,
        revision: int,
        known: bool = False,
    ) -> Rows:
        """All-gather the rows. Bucket rows are packed again only if gradients have changed."""
        if self._gather_order is not None and meeting.axis is self._gather_order.axis:
            self._gather_order.meet("agreement on gradients")
            if purpose in (Purpose.STEP, Purpose.FLUSH):
                self._gather_order.step()
        if meeting.as_of != revision:
            alone = meeting.axis.size == 1
            meeting.sent = b"" if alone else b"".join(bucket.row() for bucket in meeting.buckets)
            meeting.as_of = revision
        place = of.place if of is not None else 0
        head = array("d", self._window.row(purpose, place, edits, known=known)).tobytes()
        label, tag = "agreement on gradients", meeting.tag()
        rows = scalars.current.rows(meeting.axis, head + meeting.sent, tag, label, self._device)
        cut = len(head)
        return Rows([array("d", row[:cut]).tolist() for row in rows], [row[cut:] for row in rows])

    def share(self, trouble: str | None, purpose: Purpose) -> str | None:
        """All-reduce an error over the slices and stages of a model, so that all ranks continue or stop."""
        meeting = self._everyone
        if meeting is None:
            return trouble
        row = [*self._window.row(purpose, 0, 0, rates=False), float(trouble is not None)]
        table = scalars.current.table(meeting.axis, row, meeting.tag(), "agreement of all slices", self._device)
        others = [str(meeting.axis.ranks[rank]) for rank, numbers in enumerate(table) if numbers[-1]]
        reference = f"rank {', '.join(others)} says why" if others else None
        return trouble or disagreement([numbers[:-1] for numbers in table]) or reference
