"""Rounds of gradients on the wire: transit buffers, messages, and the sums formed where they arrive."""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from deepspeed.comm import collectives
from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import EXCHANGE, SPREAD, Handle, sum_in_rank_order, tag_of
from deepspeed.foundation.log import warn_once
from deepspeed.zero.buckets import Bucket, ReduceSettings, Round

# How long a rank waits for a buffer to come back before it takes a fresh one: ranks whose branches differ may
# complete a round only in `finish`, so waiting for ever would be a deadlock.
_PATIENCE_S = 2.0


class Wire:
    """Sends rounds and accumulates what arrives.

    Args:
        settings: how to sum.
        largest: elements of the largest group; every transit buffer holds as many.
        device: where buffers live.
        replicas: ranks that hold the same slice (hybrid sharding); None when every slice exists once.
    """

    def __init__(
        self, settings: ReduceSettings, largest: int, device: torch.device, replicas: Axis | None = None
    ) -> None:
        self.settings, self.replicas = settings, replicas
        self._largest, self._device = largest, device
        self._in_flight: deque[tuple[Handle, Bucket, Round]] = deque()
        self._pool: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._received: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)

    def busy(self, bucket: Bucket) -> bool:
        """Whether a round of `bucket` is on its way."""
        return any(b is bucket for _, b, _ in self._in_flight)

    def acquire(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A transit buffer; waits for one to come back when too much is in flight."""
        self._make_room(numel)
        free = self._pool[dtype]
        for index, buffer in enumerate(free):
            if buffer.numel() >= numel:
                return free.pop(index)[:numel]
        return torch.empty(self._largest, dtype=dtype, device=self._device)[:numel]

    def _make_room(self, numel: int) -> None:
        """Wait until `numel` more elements may be in flight."""
        limit = max(self.settings.in_flight, numel)
        while self._in_flight and sum(r.buffer.numel() for *_, r in self._in_flight) + numel > limit:
            if not self._in_flight[0][0].ready(_PATIENCE_S):
                warn_once("gradients wait for a rank that runs another branch (or is slow); taking a fresh buffer")
                break
            self._settle(*self._in_flight.popleft())

    def _release(self, round_: Round) -> None:
        if round_.pooled:
            base = round_.buffer._base
            self._pool[round_.buffer.dtype].append(round_.buffer if base is None else base)

    def _scratch(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer to receive into; comes back with `_finished`."""
        free = self._received[like.dtype, like.numel()]
        return free.pop() if free else torch.empty_like(like)

    def _finished(self, parts: list[torch.Tensor], current: Round) -> None:
        """What was received has been summed: keep its buffers for the next round."""
        sent = current.buffer.untyped_storage().data_ptr()
        for part in parts:
            if part.untyped_storage().data_ptr() != sent:
                self._received[part.dtype, part.numel()].append(part)

    def launch(self, bucket: Bucket, current: Round) -> None:
        """Send a round; parameters without a gradient in it count as zero."""
        if not current.pooled:  # an accumulator that is sent from its place has buffers to receive into all the same
            self._make_room(current.buffer.numel())
        group, end = bucket.group, 0
        for member in group.members:
            if member.index not in current.arrived:
                current.buffer[member.offset : member.offset + member.numel].zero_()
            end = member.offset + member.numel
        current.buffer[end:].zero_()
        if self.settings.watch_ranks:
            bucket.sent.append(current.buffer.sum(dtype=torch.float32))
        exact = int(current.buffer.dtype == self.settings.accumulator)
        seq = 2 * bucket.launches[exact] + exact
        bucket.launches[exact] += 1
        self._in_flight.append((self._send(bucket, current, seq), bucket, current))
        if not self.settings.overlap:
            self.settle_all()

    def _send(self, bucket: Bucket, current: Round, seq: int) -> Handle:
        group, buffer, axis = bucket.group, current.buffer, bucket.group.axis
        label = f"reduce of {group.name}"
        tag = tag_of(group.channel, EXCHANGE, seq)
        cuts, scratch = group.layout.cuts, self._scratch

        def add(parts: list[torch.Tensor]) -> Handle | None:
            return self._add(bucket, parts, current, seq)

        def share(parts: list[torch.Tensor]) -> Handle:
            return self._share(bucket, parts, current, seq)

        if not bucket.whole:
            return collectives.reduce_to_owners(axis, buffer, cuts, tag, label, add, scratch)
        if axis.size == 2 and buffer.dtype == torch.float32 and current.at_owner == 1.0:
            return collectives.all_reduce_sum(axis, buffer, label, lambda: self._take(bucket, buffer))
        if axis.size == 2 and axis.tagged:
            return collectives.swap(axis, buffer, tag, label, add, scratch)
        return collectives.reduce_to_owners(axis, buffer, cuts, tag, label, share, scratch)

    def _add(self, bucket: Bucket, parts: list[torch.Tensor], current: Round, seq: int) -> Handle | None:
        """The owner has all contributions: sum them into the accumulator."""
        if self.replicas is not None and self.replicas.size > 1:
            total = torch.empty(bucket.sum.numel(), dtype=torch.float32, device=bucket.sum.device)
            sum_in_rank_order(parts, total, current.at_owner, add=False)
            self._finished(parts, current)
            return self._across_replicas(bucket, total, seq)
        sum_in_rank_order(parts, bucket.sum, current.at_owner, add=bucket.filled)
        self._finished(parts, current)
        bucket.filled = True
        return None

    def _across_replicas(self, bucket: Bucket, total: torch.Tensor, seq: int) -> Handle:
        """Hybrid sharding: the same slice lives on several ranks; every one of them sums all of their totals."""
        axis, channel = self.replicas, bucket.group.channel
        if axis is None:
            raise RuntimeError("no replicate axis")
        n, label = total.numel(), f"reduce across replicas of {bucket.group.name}"
        table = total.new_empty(axis.size * n)
        table[axis.rank * n : (axis.rank + 1) * n] = total

        def then() -> None:
            parts = [table[r * n : (r + 1) * n] for r in range(axis.size)]
            sum_in_rank_order(parts, bucket.sum, 1.0, add=bucket.filled)
            bucket.filled = True

        handle = collectives.spread(
            axis, table, [r * n for r in range(axis.size + 1)], tag_of(channel, SPREAD, seq), label
        )
        handle.then = then
        return handle

    def _share(self, bucket: Bucket, parts: list[torch.Tensor], current: Round, seq: int) -> Handle:
        """Stage 0 on more than two ranks: the owner's sum goes to everybody."""
        group = bucket.group
        total = torch.empty(group.numel, dtype=bucket.sum.dtype, device=group.device)
        low, high = group.layout.cuts[group.axis.rank], group.layout.cuts[group.axis.rank + 1]
        sum_in_rank_order(parts, total[low:high], current.at_owner, add=False)
        self._finished(parts, current)
        handle = collectives.spread(
            group.axis, total, group.layout.cuts, tag_of(group.channel, SPREAD, seq), f"share of {group.name}"
        )
        handle.then = lambda: self._take(bucket, total)
        return handle

    def _take(self, bucket: Bucket, total: torch.Tensor) -> None:
        """Everybody has the whole sum of a round."""
        if total.data_ptr() != bucket.sum.data_ptr():
            sum_in_rank_order([total], bucket.sum, 1.0, add=bucket.filled)
        bucket.filled = True

    def _settle(self, handle: Handle, bucket: Bucket, current: Round) -> None:
        following = handle.advance()
        if following is None:
            self._release(current)
        else:
            self._in_flight.append((following, bucket, current))

    def settle_all(self) -> None:
        """Wait for everything."""
        while self._in_flight:
            self._settle(*self._in_flight.popleft())

    def close(self) -> None:
        """Let the transit buffers go."""
        self._pool.clear()
        self._received.clear()
