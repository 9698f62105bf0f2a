"""How gradients enter the rounds they travel in: dtype and factors, as the window stands."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deepspeed.zero.accumulation import AccumulationWindow
from deepspeed.zero.buckets import Bucket, ReduceSettings


class Entry(NamedTuple):
    """How the gradients of a bucket enter a round."""

    dtype: torch.dtype  # of the round
    exact: bool  # that is the accumulator's
    at_entry: float  # factor on the gradient
    at_owner: float  # factor on the sum
    sends_now: bool  # the round is sent when it is complete


class Entries:
    """The entries of an engine's buckets, each formed once for all gradients that meet the same window.

    Args:
        settings: how to sum.
        window: where its driver stands.
    """

    def __init__(self, settings: ReduceSettings, window: AccumulationWindow) -> None:
        self._settings, self._window = settings, window
        self._made: dict[tuple[torch.dtype, bool], Entry] = {}  # by kind of bucket, of one revision of the window
        self._revision = window.revision

    def of(self, bucket: Bucket) -> Entry:
        """How a gradient that arrives now enters this bucket."""
        if self._revision != self._window.revision:
            self._revision = self._window.revision
            self._made.clear()
        entry = self._made.get(bucket.kind)
        if entry is None:
            entry = self._made[bucket.kind] = self._form(bucket)
        return entry

    def _form(self, bucket: Bucket) -> Entry:
        settings, window = self._settings, self._window
        if self.summed_first(bucket) or window.weight is not None:
            dtype = settings.accumulator
        else:
            dtype = settings.wire or bucket.group.dtype
        exact = dtype == settings.accumulator
        if exact:
            at_entry, at_owner = window.factor * (1.0 if window.weight is None else window.weight), 1.0
        else:
            at_entry, at_owner = self.before_wire, window.factor / self.before_wire
        sends_now = window.reduce_now or bucket.group.policy.reduces_as_gradients_arrive
        return Entry(dtype, exact, at_entry, at_owner, sends_now)

    def summed_first(self, bucket: Bucket) -> bool:
        """Whether several micro-batches are summed before they travel."""
        return self._window.deferred and not bucket.group.policy.reduces_as_gradients_arrive

    @property
    def before_wire(self) -> float:
        """Factor on low-precision gradients before they travel."""
        return 1.0 if self._settings.prescale is None else self._settings.prescale
