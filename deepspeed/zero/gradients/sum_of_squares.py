"""Caches sums of squares of a window's gradients, so that the norm needs no second pass.

`gradient_norms` reads every sum, and its ranks exchange what they found. Where no rank has added or written anything
since, the update's norm is known to all of them. Whether that is so each rank says in the row of the agreement that
the update begins with (`accumulation.AccumulationWindow.row`), so no message more is sent for it, and one less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from deepspeed.zero.gradients.buckets import Bucket


class SumOfSquaresCache:
    """What one rank has read, and what all have told each other of it."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []  # whose norm an update forms
        self.lends_views = False  # of the sums: what is written through their `.data` no counter shows
        self.total: float | None = None  # of all ranks that hold one copy of the model; None: not exchanged
        self._revision = -1  # of the gradients when they were read
        self._read: dict[int, tuple[tuple[int, int] | None, float]] = {}  # by bucket: state of its sum, own part

    def begin(self, revision: int) -> None:
        """Forget what was read; the gradients have this revision."""
        self._revision, self._read, self.total = revision, {}, None

    def note(self, bucket: Bucket, own: float) -> None:
        """This rank's part of a bucket is `own`."""
        self._read[id(bucket)] = self._state(bucket), own

    def own(self, revision: int) -> float | None:
        """This rank's part of the norm of an update; None where gradients were added or written since, or not read."""
        if revision != self._revision:
            return None
        parts = []
        for bucket in counted(self.buckets):
            state, own = self._read.get(id(bucket), (None, 0.0))
            if state is None or state != self._state(bucket):
                return None
            parts.append(own)
        return math.fsum(parts) if parts else None

    def hold(self, revision: int) -> bool:
        """Whether `total` is still right as far as this rank knows."""
        return self.total is not None and self.own(revision) is not None

    def _state(self, bucket: Bucket) -> tuple[int, int] | None:
        """Differs where something was written to the sum, or it lies elsewhere; None where that would not be seen."""
        memory = bucket.total.memory
        if memory is None or memory.is_inference() or self.lends_views:
            return None
        return memory.data_ptr(), memory._version


def counted(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Those whose part of the norm this rank adds."""
    return [bucket for bucket in buckets if bucket.filled and bucket.group.holders.counted]
