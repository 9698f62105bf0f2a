"""Comparison of the gradient state over ranks, before gradients are used.

Each rank sends one row: the numbers of `accumulation.AccumulationWindow.row`, and for each bucket the number of
launched rounds (see [Note: rounds] in `buckets`), their factor, and one flag per parameter: whether it had a gradient.
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
    """Process group whose ranks have the same parameters, and the buckets whose state they compare.

    Args:
        axis: process group.
        channel: number of the message channel, part of each tag.
        buckets: buckets of the parameters.
        count: number of tags used so far.
        order: launch order of buckets whose messages have no tags; None if all messages have tags.
        sent: bucket rows that this rank sent last.
        as_of: revision of the reducer at which `sent` was packed; -1: never.
    """

    axis: Axis
    channel: int
    buckets: list[Bucket] = field(default_factory=list)
    count: int = 0
    order: LaunchOrder | None = None
    sent: bytes = b""
    as_of: int = -1
    _known: tuple[int, list[bytes]] | None = None

    def put_in_order(self, depart: Callable[[Bucket, ReductionRound, int], None]) -> None:
        """Set a fixed launch order, equal on all ranks, for buckets whose messages have no tags.

        Args:
            depart: function that launches a round of a bucket, given its sequence number.
        """
        untagged = [
            bucket
            for bucket in self.buckets
            if any(not axis.tagged and axis.group is not None for axis in bucket.group.ranks.summing)
        ]
        # Backward visits parameters in reverse order, so the first parameter of a group completes it.
        untagged.sort(key=lambda bucket: min(member.place for member in bucket.group.members), reverse=True)
        if untagged:
            self.order = LaunchOrder(untagged, depart)
        for bucket in untagged:
            bucket.order = self.order

    def knows(self, rows: Rows, revision: int) -> bool:
        """Return whether rows and revision are those of the last `learn`, so that nothing need be done."""
        return self._known == (revision, rows.tails)

    def learn(self, rows: Rows, revision: int) -> None:
        """Record rows that the ranks have compared, and this rank's revision of the gradients."""
        self._known = (revision, rows.tails)

    def tag(self) -> int:
        self.count += 1
        return tag_of(self.channel, SMALL, self.count)


class Rows(NamedTuple):
    """Result of `GradAgreement.exchange`: rows of all ranks, in rank order."""

    heads: list[list[float]]  # numbers of the window
    tails: list[bytes]  # packed rows of the buckets, concatenated

    @property
    def equal(self) -> bool:
        """Return whether the bucket rows of all ranks are equal."""
        return all(tail == self.tails[0] for tail in self.tails)

    def by_bucket(self, buckets: Sequence[Bucket]) -> Iterator[list[BucketRow]]:
        """Yield, for each bucket, the rows of all ranks; `buckets` must be those that were packed."""
        offset = 0
        for bucket in buckets:
            size = bucket.row_bytes
            yield [BucketRow.unpack(tail[offset : offset + size], len(bucket.touched)) for tail in self.tails]
            offset += size

    def mismatch(self, buckets: Sequence[Bucket]) -> str | None:
        """Return a description of differences that must raise an error; None if there are none.

        Different numbers of rounds are no error: ranks with fewer send zeros.
        """
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
    """Comparison of the state of gradient accumulation over the ranks of an engine.

    Args:
        axes: process groups of the engine.
        buckets: buckets of this rank.
        window: gradient accumulation state of this rank.
        device: device for collectives.
    """

    def __init__(
        self, axes: ParallelGroups, buckets: Sequence[Bucket], window: AccumulationWindow, device: torch.device
    ) -> None:
        self._window, self._device = window, device
        self._gather_order = next((b.group.gather_order for b in buckets if b.group.gather_order is not None), None)
        # A group's state is compared over all ranks with its parameters. All ranks use the process groups in one order.
        where = {axes.dp_sp_group, *(bucket.group.ranks.everyone for bucket in buckets)}
        self._meetings = [RankComparison(axis, axis.channel()) for axis in sorted(where, key=lambda axis: axis.ranks)]
        for bucket in buckets:
            next(m for m in self._meetings if m.axis is bucket.group.ranks.everyone).buckets.append(bucket)
        apart = axes.everyone is not axes.dp_sp_group
        self._everyone = RankComparison(axes.everyone, axes.everyone.channel()) if apart else None

    def meetings(self, of: ParamRecord | None = None) -> list[RankComparison]:
        """Return all comparisons (`of=None`), or a list with that of the ranks that have the parameter `of`."""
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
        """All-gather the rows of one comparison. All its ranks must call this; OrderError as in `GatherOrder.meet`.

        Args:
            meeting: element of `meetings`.
            purpose: call for which ranks synchronize.
            of: parameter whose gradient is read or written; None: all.
            edits: number of gradients that the user has changed in place since the last update.
            revision: revision of this rank's gradients; bucket rows are packed again only if it has changed.
            known: whether this rank has the global norm of the current gradients.
        """
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
        """Exchange errors over all ranks, so that either all raise or none. All ranks must call this.

        Args:
            trouble: error message of this rank; None: no error.
            purpose: call for which ranks synchronize.

        Returns:
            Own error message, or one that refers to the failed ranks; None if no rank has an error.
        """
        meeting = self._everyone
        if meeting is None:
            return trouble
        row = [*self._window.row(purpose, 0, 0, rates=False), float(trouble is not None)]
        table = scalars.current.table(meeting.axis, row, meeting.tag(), "agreement of all slices", self._device)
        others = [str(meeting.axis.ranks[rank]) for rank, numbers in enumerate(table) if numbers[-1]]
        reference = f"rank {', '.join(others)} says why" if others else None
        return trouble or disagreement([numbers[:-1] for numbers in table]) or reference
