"""Reduce-scatter of gradient buckets: transfer buffers, collectives and accumulation.

A round is one reduce-scatter of a bucket; see [Note: rounds] in `buckets`.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence

import torch

from deepspeed.comm.collectives import collectives, encoded, hierarchical
from deepspeed.comm.collectives.collectives import EXCHANGE, SPREAD, Handle
from deepspeed.comm.collectives.encoded import EncodedSlices
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.comm.shared_memory import doorbell
from deepspeed.foundation.log import warn_once
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.gradients.buckets import Bucket, ReduceSettings, ReductionRound
from deepspeed.zero.gradients.encoded_gradients import sum_parts

# Seconds for which a rank waits for a buffer in flight before it allocates another: a rank that took another branch
# of the model may complete its round only in `finish`, so waiting without a limit could deadlock.
_PATIENCE_S = 2.0
# Number of rounds checked for completion at a launch: a limit, so that launches cost the same with many in flight.
_GLANCE = 8


class GradReduceScatter:
    """Reduce-scatter of gradient rounds, asynchronous to backward; accumulates the sums that this rank owns.

    Args:
        settings: settings of gradient reduction.
        largest: maximum number of elements of a group, the size of transfer buffers.
        device: device of the gradients.
    """

    def __init__(self, settings: ReduceSettings, largest: int, device: torch.device) -> None:
        self.settings = settings
        self._largest, self._device = largest, device
        self._in_flight: OrderedDict[int, tuple[Handle, Bucket, ReductionRound]] = (
            OrderedDict()
        )  # by identity of the handle
        self._rounds: Counter[int] = Counter()  # number of rounds in flight, by identity of the bucket
        self._elements = 0  # number of elements in flight
        self._pool: dict[tuple[Axis, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._payloads: dict[tuple[Axis, int], list[torch.Tensor]] = defaultdict(list)  # by axis and bytes
        self._received: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self._lent: set[int] = set()  # addresses of receive buffers in use
        self._patience = _PATIENCE_S  # halved each time that a rank lets this one wait, until all rounds are complete
        self._settling: list[Bucket] = []  # buckets whose rounds are being waited for
        doorbell.groups.workers.add(self)  # `progress` runs whenever this rank waits, as peers may wait for its rounds

    def buffers(self) -> list[torch.Tensor]:
        """Return the idle transfer and receive buffers, and the transfer buffers in flight."""
        pools = (*self._pool.values(), *self._payloads.values(), *self._received.values())
        idle = [buffer for pool in pools for buffer in pool]
        return idle + [entry[2].buffer for entry in self._in_flight.values() if entry[2].pooled]

    def busy(self, bucket: Bucket) -> bool:
        """Return whether a round of `bucket` is in flight or queued."""
        return self._rounds[id(bucket)] > 0 or (bucket.order is not None and bucket.order.holds(bucket))

    def acquire(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Return a transfer buffer for a round; waits if the in-flight limit is reached.

        Args:
            bucket: bucket of the round.
            dtype: dtype of the buffer.

        Returns:
            1-D tensor of the group's size with undefined values; `release` returns it to the pool.
        """
        axis, numel = bucket.group.axis, bucket.group.numel
        if bucket.order is None:  # else `depart` waits, at the same point of the order on all ranks
            self._make_room(numel)
        free = self._pool[axis, dtype]
        for index, buffer in enumerate(free):
            if buffer.numel() >= numel:
                return free.pop(index)[:numel]
        return axis.empty(self._largest, dtype, self._device)[:numel]

    def _make_room(self, numel: int) -> None:
        """Wait until `numel` more elements fit into the in-flight limit, for one round at most `_PATIENCE_S`."""
        limit = max(self.settings.in_flight, numel)
        while self._in_flight and self._elements + numel > limit:
            # A round shared by several pipeline stages cannot be waited for: they launch it later in their schedules.
            first = next(
                (flight for flight in self._in_flight.values() if not flight[1].group.ranks.across_stages), None
            )
            if first is None:
                break
            if not first[0].ready(_PATIENCE_S if self.settings.overlap else self._patience):
                warn_once("gradients wait for a rank that runs another branch (or is slow); taking a fresh buffer")
                self._patience /= 2
                break
            if id(first[0]) in self._in_flight:  # else `progress` has settled it meanwhile
                self._settle(*self._land(first))

    def _fly(self, entry: tuple[Handle, Bucket, ReductionRound]) -> None:
        """Add `entry` to the rounds in flight."""
        self._in_flight[id(entry[0])] = entry
        self._rounds[id(entry[1])] += 1
        self._elements += entry[2].buffer.numel()

    def _land(self, entry: tuple[Handle, Bucket, ReductionRound]) -> tuple[Handle, Bucket, ReductionRound]:
        """Remove `entry` from the rounds in flight."""
        del self._in_flight[id(entry[0])]
        self._rounds[id(entry[1])] -= 1
        self._elements -= entry[2].buffer.numel()
        return entry

    def release(self, bucket: Bucket, round_: ReductionRound) -> None:
        """Return the transfer buffers of a round to the pools."""
        for payload in round_.payloads:
            self._payloads[bucket.group.axis, payload.numel()].append(payload)
        round_.payloads.clear()
        if round_.pooled:
            base = round_.buffer._base
            self._pool[bucket.group.axis, round_.buffer.dtype].append(round_.buffer if base is None else base)

    def _payload(self, bucket: Bucket, current: ReductionRound, slices: EncodedSlices) -> torch.Tensor:
        """Return a buffer for an encoded message of a round; `release` returns it to the pool."""
        axis, free = bucket.group.axis, self._payloads[bucket.group.axis, slices.nbytes]
        payload = free.pop() if free else axis.empty(slices.nbytes, torch.uint8, self._device)
        current.payloads.append(payload)
        return payload

    def _scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Borrow a receive buffer of the shape and dtype of `like`, until `_finished`."""
        free = self._received[like.dtype, like.numel()]
        buffer = free.pop() if free else torch.empty_like(like)
        self._lent.add(buffer.data_ptr())
        return buffer

    def _finished(self, parts: list[torch.Tensor]) -> None:
        """Return the receive buffers among `parts` to the pool, after they were summed."""
        for part in parts:
            whole = part if part._base is None else part._base  # parts may be rows of one buffer
            if whole.data_ptr() in self._lent:
                self._lent.discard(whole.data_ptr())
                self._received[whole.dtype, whole.numel()].append(whole)

    def launch(self, bucket: Bucket, current: ReductionRound) -> None:
        """Start the reduction of a round, or queue it if the bucket has a launch order.

        Args:
            bucket: bucket of the round.
            current: round; the gradients of parameters that are not in `arrived` are set to zero.
        """
        if self._in_flight and not current.pooled and bucket.order is None:
            self._make_room(current.buffer.numel())  # needs receive buffers even though it has no send buffer
        group, layout = bucket.group, bucket.group.layout
        if len(current.arrived) < len(group.members):
            for member in group.members:
                if member.index not in current.arrived:
                    current.buffer[member.offset : member.offset + member.numel].zero_()
        if layout.numel < layout.padded:
            current.buffer[layout.numel :].zero_()
        if self.settings.watch_ranks:
            bucket.sent.append(current.buffer.sum(dtype=torch.float32))
        exact = int(current.buffer.dtype == self.settings.accumulator)
        seq = 2 * bucket.launches[exact] + exact
        bucket.launches[exact] += 1
        if group.axis.size == 1 and group.ranks.copies is None:
            self._keep(bucket, current)
        elif bucket.order is None:
            self.depart(bucket, current, seq)
        else:
            usual = (self.settings.comm_dtype or bucket.group.dtype) == current.buffer.dtype
            bucket.order.add((bucket, current, seq), usual)

    def depart(self, bucket: Bucket, current: ReductionRound, seq: int) -> None:
        """Start the reduction of a round now.

        Args:
            bucket: bucket of the round.
            current: round with all gradients.
            seq: sequence number for message tags: 2 * (number of earlier rounds of its kind), + 1 if exact.
        """
        if bucket.order is not None:
            self._make_room(current.buffer.numel())
        self._fly((self._send(bucket, current, seq), bucket, current))
        if not self.settings.overlap:
            self._wait_in_backward()
        elif bucket.group.axis.shared is not None:
            doorbell.groups.drain()
            self.progress(_GLANCE)

    def _wait_in_backward(self) -> None:
        """Wait until the rounds in flight are reduced and accumulated (`overlap_comm` false).

        A rank that took another branch of the model may send its part of a round only in `finish`, and another pipeline
        stage its part only after this micro-batch. So a round whose messages carry tags is awaited for a time that
        halves with each late round, and then left to `finish`; a round shared with another stage is not awaited.
        """
        entries = [entry for entry in self._in_flight.values() if not entry[1].group.ranks.across_stages]
        if all(bucket.order is not None for _, bucket, _ in entries):  # launched in the same order on all ranks
            self.settle(None if len(entries) == len(self._in_flight) else [bucket for _, bucket, _ in entries])
            return
        skipped = {
            id(entry[1]) for entry in self._in_flight.values() if entry[2].late or entry[1].group.ranks.across_stages
        }
        while entry := next((each for each in self._in_flight.values() if id(each[1]) not in skipped), None):
            handle, bucket, current = entry
            if not handle.ready(self._patience):
                warn_once("gradients wait for a rank that runs another branch (or is slow); they are summed later")
                current.late = True
                self._patience /= 2
                skipped.add(id(bucket))
            elif id(handle) in self._in_flight:  # else `progress` has settled it meanwhile
                self._settle(*self._land(entry))

    def _keep(self, bucket: Bucket, current: ReductionRound) -> None:
        """Accumulate a round on an axis with one rank, without communication."""
        if not current.pooled and bucket.group.tiers.optimizer is RESIDENT:
            if current.post_reduce_scale != 1.0:
                current.buffer.mul_(current.post_reduce_scale)
            bucket.filled = True  # the gradients were collected in the accumulator itself
            return
        leaving = bucket.add([current.buffer], current.post_reduce_scale)
        if leaving is None:
            self.release(bucket, current)
        else:
            self._fly((leaving, bucket, current))

    def _send(self, bucket: Bucket, current: ReductionRound, seq: int) -> Handle:
        """Start the reduction of a round, by whole buffers or by rows."""
        if bucket.rows is None:
            return self._send_whole(bucket, current, seq)
        encoding, peers = bucket.encoded, bucket.group.axis.size - 1
        nbytes = current.buffer.nbytes if encoding is None or encoding.slices is None else encoding.slices.nbytes
        return bucket.rows.reduce(
            current.buffer,
            seq,
            nbytes * peers * (2 if bucket.whole else 1),
            lambda: self._send_whole(bucket, current, seq),
            lambda parts: bucket.add_rows(parts, current.post_reduce_scale, current.buffer),
        )

    def _send_whole(self, bucket: Bucket, current: ReductionRound, seq: int) -> Handle:
        """Start the collective for whole buffers: reduce-scatter or all-reduce, with or without replicas."""
        group, buffer, axis = bucket.group, current.buffer, bucket.group.axis.reductions
        label = f"reduce of {group.name}"
        tag = tag_of(group.channel, EXCHANGE, seq)
        cuts, scratch, ordered = group.layout.cuts, self._scratch, self.settings.in_rank_order

        def add(parts: list[torch.Tensor]) -> Handle | None:
            return self._add(bucket, parts, current, seq)

        def share(parts: list[torch.Tensor]) -> Handle:
            return self._share(bucket, parts, current, seq)

        if bucket.encoded is not None and bucket.encoded.slices is not None:
            return self._send_encoded(bucket, current, (tag, seq), label, share if bucket.whole else add)
        copies = group.ranks.copies
        if copies is not None and not (bucket.whole or copies.tagged or copies.group is None):
            # Both sums are started here, so that their order is the same on all ranks.
            copies, scale = copies.reductions, current.post_reduce_scale
            encoding = bucket.encoded
            if encoding is not None and encoding.copies is not None:
                form = encoding.copies.layouts[copies.rank]
                return encoding.reduce_to_copies(
                    buffer, label, scale, bucket.unit, lambda parts: bucket.add(parts, 1.0, form), ordered
                )
            return hierarchical.reduce_to_copies(
                axis, copies, buffer, cuts, label, scale, lambda parts: bucket.add(parts, 1.0), ordered
            )
        if not bucket.whole:
            return hierarchical.reduce_to_owners(axis, buffer, cuts, tag, label, add, scratch, ordered)
        # All-reduce in place if the buffer is the accumulator: it must not be written while peers read it.
        exact = current.post_reduce_scale == 1.0 and (buffer.dtype == torch.float32 or not current.pooled)
        if exact and axis.can_all_reduce(buffer.dtype):
            tags = (tag, tag_of(group.channel, SPREAD, seq))
            return collectives.all_reduce_sum(axis, buffer, cuts, tags, label, lambda: self._take(bucket, buffer))
        if axis.size == 2 and axis.tagged:
            return collectives.swap(axis, buffer, tag, label, add, scratch)
        return hierarchical.reduce_to_owners(axis, buffer, cuts, tag, label, share, scratch, ordered)

    def _send_encoded(
        self,
        bucket: Bucket,
        current: ReductionRound,
        number: tuple[int, int],
        label: str,
        finish: Callable[[list[torch.Tensor]], Handle | None],
    ) -> Handle:
        """Encode the parts of a round for their owners and start to send them; see `_send`.

        Args:
            number: tag of the messages, and number of the round.
        """
        encoding = bucket.encoded
        if encoding is None or encoding.slices is None:
            raise RuntimeError(f"messages of {bucket.group.name} are not encoded")
        payload, slices = self._payload(bucket, current, encoding.slices), encoding.slices
        axis, both = bucket.group.axis.reductions, encoding.two_steps
        message = encoding.message(slices, payload, encoding.memory, current.post_reduce_scale * bucket.unit)
        if both is not None:
            return both.reduce(current.buffer, message, number[1], label, finish, self._scratch)
        return encoded.reduce_to_owners(axis, current.buffer, message, number[0], label, finish, self._scratch)

    def _add(self, bucket: Bucket, parts: list[torch.Tensor], current: ReductionRound, seq: int) -> Handle | None:
        """Sum all ranks' parts of this rank's shard into the accumulator; return the handle of a next phase, if any."""
        layout = None if bucket.encoded is None else bucket.encoded.part
        if bucket.group.ranks.copies is not None:
            total = torch.empty(bucket.total.numel, dtype=torch.float32, device=bucket.group.device)
            sum_parts(parts, total, current.post_reduce_scale, False, not self.settings.in_rank_order, layout)
            self._finished(parts)
            return self._across_copies(bucket, bucket.group.ranks.copies.reductions, total, seq)
        leaving = bucket.add(parts, current.post_reduce_scale, layout)
        self._finished(parts)
        return leaving

    def _across_copies(self, bucket: Bucket, axis: Axis, total: torch.Tensor, seq: int) -> Handle:
        """All-gather `total` over the ranks with the same shard (hybrid sharding, tied weights) and add the parts."""
        channel = bucket.group.copies_channel
        n, label = total.numel(), f"reduce across copies of {bucket.group.name}"
        encoding, tag = bucket.encoded, tag_of(channel, SPREAD, seq)
        if encoding is not None and encoding.copies is not None:
            slices = encoding.copies
            handle, payload = encoding.share_with_copies(axis, total, tag, label, bucket.unit)
            parts = [slices.bytes_of(payload, rank) for rank in range(axis.size)]
            return handle.followed_by(lambda: bucket.add(parts, 1.0, slices.layouts[axis.rank]))
        table = total.new_empty(axis.size * n)
        table[axis.rank * n : (axis.rank + 1) * n] = total

        def then() -> Handle | None:
            return bucket.add([table[r * n : (r + 1) * n] for r in range(axis.size)], 1.0)

        cuts = [r * n for r in range(axis.size + 1)]
        return collectives.share(axis, table, cuts, tag, label).followed_by(then)

    def _share(self, bucket: Bucket, parts: list[torch.Tensor], current: ReductionRound, seq: int) -> Handle:
        """Sum this rank's part and all-gather the sums (stage 0 on more than two ranks)."""
        group = bucket.group
        total = torch.empty(group.numel, dtype=bucket.dtype, device=group.device)
        low, high = group.layout.cuts[group.axis.rank], group.layout.cuts[group.axis.rank + 1]
        encoding = bucket.encoded
        layout = None if encoding is None else encoding.part
        scale, any_order = current.post_reduce_scale, not self.settings.in_rank_order
        sum_parts(parts, total[low:high], scale, False, any_order, layout)
        self._finished(parts)
        current.shared = True
        tag, label, axis = tag_of(group.channel, SPREAD, seq), f"share of {group.name}", group.axis.reductions
        if encoding is not None and encoding.slices is not None:
            slices = encoding.slices if encoding.shared is None else encoding.shared
            payload = self._payload(bucket, current, slices)
            message = encoding.message(slices, payload, encoding.sum_memory, bucket.unit)
            if encoding.two_steps is not None and encoding.shared is None:
                handle = encoding.two_steps.all_gather(total, message, seq, label)
            else:
                handle = encoded.all_gather(axis, total, message, tag, label, any_order=True)
        else:
            handle = collectives.share(axis, total, group.layout.cuts, tag, label)
        return handle.followed_by(lambda: self._take(bucket, total))

    def _take(self, bucket: Bucket, total: torch.Tensor) -> None:
        """Add the whole sum of a round to the accumulator."""
        if total.data_ptr() == bucket.total.acquire().data_ptr():  # all-reduced in place; never offloaded at stage 0
            bucket.filled = True
        else:
            bucket.add([total], 1.0)

    def progress(self, most: int | None = None) -> None:
        """Process rounds whose messages have arrived, without waiting; peers can then reuse their send buffers.

        Args:
            most: number of rounds to check, oldest first; None: all. Rounds of one bucket are processed in order.
        """
        seen = {id(bucket) for bucket in self._settling}
        for entry in list(itertools.islice(self._in_flight.values(), most)):
            handle, bucket, _ = entry
            if id(bucket) in seen:
                continue
            seen.add(id(bucket))
            if handle.ready(0.0) and id(handle) in self._in_flight:
                self._settle(*self._land(entry))

    def _settle(self, handle: Handle, bucket: Bucket, current: ReductionRound) -> None:
        """Wait for one phase of a round; then start its next phase, or release its buffer."""
        self._settling.append(bucket)
        following = handle.advance()
        self._settling.remove(bucket)
        if following is None:
            self.release(bucket, current)
            return
        # The next phase goes to the end of the queue, since peers need the first phase of every round first. Later
        # rounds of this bucket stay behind it: ranks that process them in different orders would deadlock.
        later = [entry for entry in self._in_flight.values() if entry[1] is bucket] if self.busy(bucket) else []
        for entry in later:
            self._land(entry)
        for entry in ((following, bucket, current), *later):
            self._fly(entry)

    def settle(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Wait until the rounds of these buckets (None: of all) are reduced and accumulated."""
        if not self._in_flight:
            return
        if buckets is None:
            self._share_first()
        wanted = None if buckets is None else {id(bucket) for bucket in buckets}
        flying = self._in_flight.values()
        while entry := next((each for each in flying if wanted is None or id(each[1]) in wanted), None):
            self._settle(*self._land(entry))
        if not self._in_flight:
            self._patience = _PATIENCE_S

    def _share_first(self) -> None:
        """Form the stage-0 sums between devices first, so that their all-gathers overlap with other rounds."""
        while unformed := [entry for entry in self._in_flight.values() if self._is_unformed(*entry[1:])]:
            for entry in unformed:  # one phase each; a sum over several hosts has two
                self._settle(*self._land(entry))

    def _is_unformed(self, bucket: Bucket, current: ReductionRound) -> bool:
        """Return whether a stage-0 round between devices still waits for its sum."""
        alone = self._rounds[id(bucket)] == 1
        return bucket.whole and bucket.group.between_devices and not current.shared and alone

    def forget_buffers(self) -> None:
        """Free the idle transfer buffers."""
        self._pool.clear()
        self._payloads.clear()
        self._received.clear()

    def close(self) -> None:
        self.forget_buffers()
        doorbell.groups.workers.discard(self)
