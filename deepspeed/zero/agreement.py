"""Which ranks agree on what before gradients are used: rows of numbers, on the axes whose ranks share a group.

What a rank says of its window is in `accumulation.AccumulationWindow.row`; behind it stand, for each group, its rounds
sent so far, the factor of those in low precision, and which parameters had a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed.comm import scalars
from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import SMALL, tag_of
from deepspeed.zero.accumulation import WIDTH, AccumulationWindow, Purpose, disagreement
from deepspeed.zero.buckets import Bucket, Round
from deepspeed.zero.holders import Axes
from deepspeed.zero.launch_order import LaunchOrder
from deepspeed.zero.member import Member
from deepspeed.zero.shard_group import group_of


@dataclass(eq=False)
class Meeting:
    """Ranks that agree on the groups whose parameters they all have."""

    axis: Axis
    channel: int
    buckets: list[Bucket] = field(default_factory=list)
    count: int = 0
    order: LaunchOrder | None = None

    def put_in_order(self, depart: Callable[[Bucket, Round, int], None]) -> None:
        """Launch rounds in one order where messages carry no tags."""
        untagged = [b for b in self.buckets if not b.group.axis.tagged and b.group.axis.group is not None]
        # Backward goes through the model from its end, and a group is complete with the first of its parameters.
        untagged.sort(key=lambda bucket: min(member.place for member in bucket.group.members), reverse=True)
        if untagged:
            self.order = LaunchOrder(untagged, depart)
        for bucket in untagged:
            bucket.order = self.order

    def tag(self) -> int:
        """Of the next row."""
        self.count += 1
        return tag_of(self.channel, SMALL, self.count)


class Agreement:
    """The meetings of an engine's ranks.

    Args:
        axes: all ranks, by what they share.
        buckets: the gradient side of the engine's groups.
        window: where its driver stands.
        device: where messages start on axes whose backend is not on the CPU.
    """

    def __init__(self, axes: Axes, buckets: Sequence[Bucket], window: AccumulationWindow, device: torch.device) -> None:
        self._window, self._device = window, device
        self._gather_order = next((b.group.gather_order for b in buckets if b.group.gather_order is not None), None)
        # Ranks agree on a group with all that have its parameters, and all meet on their axes in one order.
        where = {axes.world, *(bucket.group.holders.everyone for bucket in buckets)}
        self._meetings = [Meeting(axis, axis.channel()) for axis in sorted(where, key=lambda axis: axis.ranks)]
        for bucket in buckets:
            next(m for m in self._meetings if m.axis is bucket.group.holders.everyone).buckets.append(bucket)
        apart = axes.everyone is not axes.world
        self._everyone = Meeting(axes.everyone, axes.everyone.channel()) if apart else None

    def meetings(self, of: Member | None = None) -> list[Meeting]:
        """All meetings, or the one of ranks that have a parameter: those of other slices do not look at it."""
        if of is None:
            return self._meetings
        return [meeting for meeting in self._meetings if meeting.axis is group_of(of).holders.everyone]

    def exchange(self, meeting: Meeting, purpose: Purpose, of: Member | None, edits: int) -> list[list[float]]:
        """Everybody's row.

        Args:
            meeting: who takes part; all of them call together.
            purpose: why they meet.
            of: the parameter that is read or written, if it is one.
            edits: gradients that were changed in place.
        """
        if self._gather_order is not None and meeting.axis is self._gather_order.axis:
            self._gather_order.meet("agreement on gradients")
        row = self._window.row(purpose, of.place if of is not None else 0, edits)
        for bucket in meeting.buckets if meeting.axis.size > 1 else ():
            launches = bucket.launches if bucket.sum is not None else (-1, -1)
            row += [*launches, bucket.factor, *bucket.touched]
        return scalars.current.table(meeting.axis, row, meeting.tag(), "agreement on gradients", self._device)

    def share(self, trouble: str | None, purpose: Purpose) -> str | None:
        """Slices and stages of a model go on together, or stop together.

        Args:
            trouble: what is wrong on this rank's axes.
            purpose: why ranks meet.

        Returns:
            What is wrong anywhere.
        """
        meeting = self._everyone
        if meeting is None:
            return trouble
        row = [*self._window.row(purpose, 0, 0, rates=False), float(trouble is not None)]
        table = scalars.current.table(meeting.axis, row, meeting.tag(), "agreement of all slices", self._device)
        others = [str(meeting.axis.ranks[rank]) for rank, numbers in enumerate(table) if numbers[-1]]
        told = f"rank {', '.join(others)} says why" if others else None
        return trouble or disagreement([numbers[:-1] for numbers in table]) or told


def uneven(buckets: Sequence[Bucket], table: list[list[float]]) -> str | None:
    """What the rows say that no zeros can mend; None when there is nothing."""
    at = WIDTH
    if all(row[at:] == table[0][at:] for row in table):
        return None
    for bucket in buckets:
        launches, factors = [row[at : at + 2] for row in table], {row[at + 2] for row in table} - {0.0}
        at += 3 + len(bucket.touched)
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
