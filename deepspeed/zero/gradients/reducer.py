"""Gradient reducer: collects gradients from autograd hooks in buckets, and reduces them over ranks.

A round is one reduce-scatter of a bucket (see [Note: rounds] in `buckets`), and a window the sequence of micro-batches
between two optimizer updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from deepspeed.comm.collectives import collectives
from deepspeed.comm.collectives.collectives import READ
from deepspeed.comm.process_groups.axis import axes_here
from deepspeed.errors import UsageError
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import warn_once
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.gradients.accumulation import AccumulationWindow, Agreed, Purpose, Way, disagreement
from deepspeed.zero.gradients.buckets import (
    Bucket,
    BucketRow,
    ReduceSettings,
    ReductionRound,
    SumOfSquaresCache,
)
from deepspeed.zero.gradients.encoded_gradients import ErrorMemory
from deepspeed.zero.gradients.grad_views import GradViewTracker
from deepspeed.zero.gradients.rank_agreement import GradAgreement, RankComparison, Rows
from deepspeed.zero.gradients.reduce_scatter import GradReduceScatter
from deepspeed.zero.gradients.sparse_rows import add_rows, can_add
from deepspeed.zero.parameters.parallel_groups import ParallelGroups
from deepspeed.zero.parameters.parameter import raw_grad, set_raw_grad
from deepspeed.zero.parameters.record import ParameterGroup, ParamRecord
from deepspeed.zero.parameters.replaced_parameters import Replaced
from deepspeed.zero.parameters.shard_group import ShardGroup


class GradScale(NamedTuple):
    """Dtype and factors with which a gradient is reduced."""

    dtype: torch.dtype  # dtype of the round's buffer
    sums: bool  # whether several gradients of a parameter are added in the buffer: else each has a round of its own
    pre_reduce_scale: float  # factor on the gradient
    post_reduce_scale: float  # factor on the sum
    sends_now: bool  # launch the round as soon as it is complete


class GradScales:
    """Cache of `GradScale` by kind of bucket, valid until the state of the window changes.

    Args:
        settings: settings of gradient reduction.
        window: gradient accumulation state.
    """

    def __init__(self, settings: ReduceSettings, window: AccumulationWindow) -> None:
        self._settings, self._window = settings, window
        # By kind of bucket and whether it takes gradients itself, for `_revision`.
        self._made: dict[tuple[tuple[torch.dtype, bool], bool], GradScale] = {}
        self._revision = window.revision

    def of(self, bucket: Bucket) -> GradScale:
        """Return dtype and factors for a gradient of `bucket` in the current state of the window."""
        if self._revision != self._window.revision:
            self._revision = self._window.revision
            self._made.clear()
        key = bucket.kind, bucket.takes_gradients
        entry = self._made.get(key)
        if entry is None:
            entry = self._made[key] = self._form(bucket)
        return entry

    def _form(self, bucket: Bucket) -> GradScale:
        settings, window = self._settings, self._window
        if self.summed_first(bucket) or window.weight is not None:
            dtype = settings.accumulator
        else:
            dtype = settings.comm_dtype or bucket.group.dtype
        sums = dtype == settings.accumulator
        if sums:
            at_entry, at_owner = window.factor * (1.0 if window.weight is None else window.weight), 1.0
        else:
            at_entry, at_owner = self.prescale, window.factor / self.prescale
        if not sums and bucket.takes_gradients and settings.comm_dtype is None and settings.prescale is None:
            dtype = settings.accumulator  # of the same values as a round in low precision, without its buffer
        sends_now = window.reduce_now or bucket.group.policy.reduces_as_gradients_arrive
        return GradScale(dtype, sums, at_entry, at_owner, sends_now)

    def summed_first(self, bucket: Bucket) -> bool:
        """Return whether the bucket sums several micro-batches before the reduction."""
        return self._window.deferred and not bucket.group.policy.reduces_as_gradients_arrive

    @property
    def prescale(self) -> float:
        """Return the factor on low-precision gradients before the reduction."""
        return 1.0 if self._settings.prescale is None else self._settings.prescale


class Reducer:
    """Gradient reducer of an engine: collects, reduces and accumulates the gradients of its parameters.

    Args:
        axes: process groups of the engine.
        groups: parameter groups, each of which gets one bucket.
        settings: settings of gradient reduction.
        window: gradient accumulation state.
        on_complete: called with a group before the launch of a round with all its gradients; None: no callback.
    """

    def __init__(
        self,
        axes: ParallelGroups,
        groups: list[ShardGroup],
        settings: ReduceSettings,
        window: AccumulationWindow,
        on_complete: Callable[[ShardGroup], None] | None = None,
    ) -> None:
        self.axes, self.settings, self.window = axes, settings, window
        self.buckets = [
            Bucket(group, settings.accumulator, settings.accumulates, not settings.in_rank_order, settings.wire)
            for group in groups
        ]
        self._of = {id(b.group): b for b in self.buckets}
        self.clean = True
        self.revision = 0  # changes with each change of the gradients or of the state that ranks compare
        self._launched = -1  # last revision for which all rounds were launched
        self.squares = SumOfSquaresCache()
        self._wait_timer: Callable[[], AbstractContextManager[object]] = nullcontext
        self._on_complete = on_complete
        largest = max((g.numel for g in groups), default=0)
        self.device = groups[0].device if groups else torch.device("cpu")
        axes_here().separate_reductions((axis for group in groups for axis in group.ranks.summing), axes.everyone)
        self.reduce_scatter = GradReduceScatter(settings, largest, self.device)
        self._agreement = GradAgreement(axes, self.buckets, window, self.device)
        for meeting in self._agreement.meetings():
            meeting.put_in_order(self.reduce_scatter.depart)
        self._touched_anywhere: dict[int, bytearray] = {}
        self._handed_out = GradViewTracker()
        self._hooks: dict[int, Any] = {}
        self.muted = False  # ignore arriving gradients, while backward is rerun for diagnosis
        self._entries = GradScales(settings, window)
        self.replaced = Replaced(self.listen, self.arrived)
        for group in groups:
            for member in group.members:
                member.reducer = self
                self.listen(member)

    # -- arrival --------------------------------------------------------------------------------------------------

    def listen(self, member: ParamRecord, anew: bool = False) -> None:
        """Register the gradient hook of a parameter if it is trained, and allocate its accumulator.

        Args:
            member: parameter.
            anew: replace the hook, because the parameter has a new tensor.
        """
        if anew and member.uid in self._hooks:
            self._hooks.pop(member.uid).remove()
            param: Any = member.param
            param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
        if member.param.requires_grad and member.uid not in self._hooks:
            self._of[id(member.group)].prepare()
            self.revision += 1
            self._hooks[member.uid] = member.param.register_post_accumulate_grad_hook(_GradHook(member))

    def arrived(self, member: ParamRecord) -> None:
        """Move a parameter's new gradient from autograd to its bucket, and launch the round if it is complete."""
        param = member.param
        gradient = raw_grad(param)
        if gradient is None:
            return
        if collectives.PLANTED_DELAY is not None:
            collectives.delay(f"gradient of {member.name}")
        set_raw_grad(param, None)
        if self.muted:
            return
        self.clean = False
        self.revision += 1
        if self._handed_out.used:
            self._adopt_edits()
            self._handed_out.close()
        self.window.entering()
        if self.window.unscaled:
            warn_once("loss.backward() under fp16 is taken as unscaled and may underflow; use engine.backward or scale")
        bucket = self._of[id(member.group)]
        bucket.touched[member.index] = 1
        if gradient.requires_grad:  # `create_graph=True`: the sum over ranks is not differentiable
            gradient = gradient.detach()
        entry = self._entries.of(bucket)
        if gradient.layout != torch.strided and not can_add(gradient, entry.dtype, member.padded):
            gradient = gradient.to_dense()
        current = self._enter(bucket, member, gradient, entry)
        if entry.sends_now:
            current.fresh.add(member.index)
            if len(current.fresh) >= current.expected:
                if self._on_complete is not None:
                    self._on_complete(bucket.group)
                self._launch(bucket)

    def _enter(self, bucket: Bucket, member: ParamRecord, gradient: torch.Tensor, how: GradScale) -> ReductionRound:
        """Copy or add one gradient to the open round, and return the round; opens one if needed."""
        current, index = bucket.round, member.index
        if current is not None:
            again = not how.sums and index in current.arrived  # a sum in low precision would round
            if again or current.buffer.dtype != how.dtype or current.post_reduce_scale != how.post_reduce_scale:
                self._launch(bucket)
                current = None
        if current is None:
            current = bucket.round = self._open(bucket, how.dtype, how.post_reduce_scale)
        if member.padded:
            gradient = member.without_padding(gradient)
        place = bucket.place(current.buffer, index)
        if gradient.is_sparse:
            rows = gradient if how.sums else gradient.coalesce()
            add_rows(place, rows, how.pre_reduce_scale, index in current.arrived)
            current.arrived.add(index)
            return current
        if index in current.arrived:
            place.add_(gradient.to(how.dtype), alpha=how.pre_reduce_scale)
            return current
        current.arrived.add(index)
        if how.pre_reduce_scale == 1.0 or gradient.dtype != how.dtype:
            place.copy_(gradient)
            if how.pre_reduce_scale != 1.0:
                place.mul_(how.pre_reduce_scale)
        else:
            torch.mul(gradient, how.pre_reduce_scale, out=place)
        return current

    def _open(self, bucket: Bucket, dtype: torch.dtype, at_owner: float) -> ReductionRound:
        """Open a round, in the bucket's accumulator if it is empty and idle, else in a transfer buffer.

        UsageError if `offload_states` has moved the accumulator.
        """
        if bucket.group.tiers.optimizer is RESIDENT:
            bucket.total.acquire(read=False)
        expected = [member.param.requires_grad for member in bucket.group.members].count(True)
        local = bucket.local
        if local is not None and local.dtype == dtype and not bucket.filled and not self.reduce_scatter.busy(bucket):
            return ReductionRound(local, at_owner, False, expected)
        return ReductionRound(self.reduce_scatter.acquire(bucket, dtype), at_owner, True, expected)

    def _launch(self, bucket: Bucket) -> None:
        """Launch the open round of a bucket, if there is one."""
        current, bucket.round = bucket.round, None
        if current is not None:
            current = self._narrowed(bucket, current)
            if bucket.encoded is not None and not any(bucket.launches):
                counts = self.window.ways & (Way.ITEMS | Way.SAMPLES) and self.window.items > 0
                bucket.unit = 1.0 / self.window.items if counts else 1.0
            if current.buffer.dtype != self.settings.accumulator:
                bucket.note_factor(current.post_reduce_scale)
            self.reduce_scatter.launch(bucket, current)

    def _narrowed(self, bucket: Bucket, current: ReductionRound) -> ReductionRound:
        """Return the round, converted to the communication dtype if its buffer has another dtype."""
        dtype = self.settings.comm_dtype
        if dtype is None or current.buffer.dtype == dtype:
            return current
        narrow = self.reduce_scatter.acquire(bucket, dtype)
        at_owner = self.window.travel_factor / self._entries.prescale
        torch.mul(current.buffer, 1.0 / at_owner, out=narrow)
        self.reduce_scatter.release(bucket, current)
        return ReductionRound(narrow, at_owner, True, arrived=current.arrived)

    # -- the end of a window --------------------------------------------------------------------------------------

    def finish(self, purpose: Purpose = Purpose.READ, of: ParamRecord | None = None) -> Agreed:
        """Complete the reduction: launch open rounds, compare the state over ranks, and wait for the sums.

        Collective: all ranks must call this (with `of`, all ranks that have the parameter).

        Args:
            purpose: call for which ranks synchronize.
            of: parameter whose gradient is needed; None: all.

        Returns:
            Values of the window on which all ranks agree.

        Raises:
            UsageError: ranks have made different calls, or a gradient was changed in place too late after its read. All
                gradients since the last update are discarded.
        """
        if self._handed_out.used:
            self._adopt_edits(of)
        self._launch_open()
        late = self._handed_out.late() if of is None and self._handed_out.used else []
        edits = self._handed_out.edits + len(late)
        trouble, agreement, updates = None, None, purpose in (Purpose.STEP, Purpose.FLUSH)
        known = updates and self.squares.total is not None and self.squares.hold(self.revision)
        for meeting in self._agreement.meetings(of):
            rows = self._agreement.exchange(meeting, purpose, of, edits, self.revision, known)
            trouble = trouble or disagreement(rows.heads)
            if not meeting.knows(rows, self.revision):
                trouble = trouble or rows.mismatch(meeting.buckets)
                self._catch_up(meeting, rows)
                meeting.learn(rows, self.revision)
            if agreement is None or meeting.axis is self.axes.dp_sp_group:
                agreement = Agreed.of(rows.heads)
        if of is None:
            trouble = self._agreement.share(trouble, purpose)
        if trouble is not None:
            self._reject_window(
                f"ranks disagree about the window of gradients: {trouble}. All ranks must make the same calls"
            )
        if late:
            self._reject_window(
                f"the gradient of {', '.join(late[:8])} was read, and changed after more gradients had been added to "
                f"it: read .grad again and change that"
            )
        with self._wait_timer():
            self.reduce_scatter.settle(None if of is None else self._agreement.meetings(of)[0].buckets)
        if agreement is None:
            raise RuntimeError("a bucket without a meeting")
        return agreement

    def _reject_window(self, trouble: str) -> None:
        """Drop the gradients of the window and raise UsageError, on all ranks alike."""
        self.reduce_scatter.settle()
        self.clear()
        self.window.restart()
        raise UsageError(f"{trouble}; nothing was updated, and the window's gradients are dropped")

    def _launch_open(self) -> None:
        """Launch the open rounds of all buckets."""
        if self._launched == self.revision:
            return
        if self._handed_out.used:
            self._handed_out.close(own=True)
        for bucket in self.buckets:
            if bucket.round is not None:
                self._launch(bucket)
            elif bucket.group.ranks.across_stages and not self.clean:
                unlaunched_copies.current(self, bucket)
        self._launched = self.revision

    def _catch_up(self, meeting: RankComparison, rows: Rows) -> None:
        """Launch rounds of zeros where other ranks have launched more rounds, and launch the queued rounds."""
        if rows.equal:
            self._touched_anywhere |= {id(bucket): bytearray(bucket.touched) for bucket in meeting.buckets}
        else:
            for bucket, table in zip(meeting.buckets, rows.by_bucket(meeting.buckets), strict=True):
                self._even_out(bucket, table)
            self._launched = self.revision = self.revision + 1
        if meeting.order is not None:
            meeting.order.flush([bucket for bucket in meeting.buckets if any(self._touched_anywhere[id(bucket)])])

    def _even_out(self, bucket: Bucket, table: list[BucketRow]) -> None:
        """Launch rounds of zeros until this rank has launched as many rounds of a bucket as any other rank."""
        factor = max(row.factor for row in table)
        for exact in (0, 1):
            while bucket.launches[exact] < max(row.launches[exact] for row in table):
                bucket.prepare()  # no effect unless the group is frozen on this rank only; then all ranks raise
                self.send_zeros(bucket, exact, factor)
        columns = zip(*(row.touched for row in table), strict=True)
        self._touched_anywhere[id(bucket)] = bytearray(any(column) for column in columns)

    def send_zeros(self, bucket: Bucket, exact: int, factor: float) -> None:
        """Launch a round of zeros.

        Args:
            bucket: bucket of the round.
            exact: 1: in the accumulator's dtype; 0: in the communication dtype (default: the group's dtype).
            factor: factor on the sum of a low-precision round, as on the other ranks.
        """
        low = self.settings.comm_dtype or bucket.group.dtype
        dtype = self.settings.accumulator if exact else low
        at_owner = 1.0 if exact else abs(factor) or 1.0
        bucket.round = ReductionRound(self.reduce_scatter.acquire(bucket, dtype), at_owner, pooled=True)
        self._launch(bucket)

    def marks(self, bucket: Bucket) -> bytearray | None:
        """Return one byte per parameter of a bucket: 1 if any rank had a gradient. None before `finish`."""
        return self._touched_anywhere.get(id(bucket))

    def touched(self, bucket: Bucket, member: ParamRecord) -> bool:
        """Return whether any rank had a gradient of the parameter since the last update; valid after `finish`."""
        marks = self.marks(bucket)
        return bool(marks and marks[member.index])

    def _adopt_edits(self, of: ParamRecord | None = None) -> None:
        """Write gradients that the user has read and changed in place back to the accumulator or the open round."""
        for member, tensor, own in self._handed_out.take_edited(of):
            current = self.bucket_of(member.group).round
            if not own:
                self._write(member, tensor)
            elif current is not None:
                current.buffer[member.offset : member.offset + member.numel] = tensor.reshape(-1)

    def clear(self) -> None:
        """Discard all gradients; the next ones overwrite the accumulators."""
        for bucket in self.buckets:
            bucket.clear()
        self._touched_anywhere.clear()
        self.revision += 1
        if self._handed_out.used:
            self._handed_out.clear()
        self.clean = True
        self.window.forget()

    def drop(self) -> None:
        """Synchronize the ranks and discard all gradients (`zero_grad`). All ranks must call this."""
        if not self.clean:
            self.finish(Purpose.ZERO_GRAD)
            self.clear()
        self.window.forget()

    def time_waits(self, timer: Callable[[], AbstractContextManager[object]]) -> None:
        """Set a factory of context managers, one of which is entered around each wait for reductions."""
        self._wait_timer = timer

    def set_accumulates(self, accumulates: bool) -> None:
        self.settings = self.reduce_scatter.settings = replace(self.settings, accumulates=accumulates)

    def detach(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.reduce_scatter.close()

    def error_memories(self) -> dict[str, ErrorMemory]:
        """Return the error memories of encoded gradients, by group and kind."""
        return {
            f"{bucket.group.name}: {kind}": memory
            for bucket in self.buckets
            if bucket.encoded is not None
            for kind, memory in bucket.encoded.memories.items()
        }

    # -- access of users ------------------------------------------------------------------------------------------

    def bucket_of(self, group: ParameterGroup) -> Bucket:
        return self._of[id(group)]

    def grad_of(self, member: ParamRecord) -> torch.Tensor | None:
        """Return a copy of a parameter's accumulated gradient; see `ManagedParameter.grad`.

        While micro-batches are summed before the reduction, this is the gradient of this rank. Otherwise the gradient
        is reduced, and all ranks with the parameter must call this.

        Returns:
            Tensor in the parameter's shape, tracked so that in-place changes take effect; None if there is no gradient.
        """
        if self.clean:
            return None
        bucket, low, high = self.bucket_of(member.group), member.offset, member.offset + member.numel
        if self._entries.summed_first(bucket) and not self.window.reduce_now and not bucket.filled:
            current = bucket.round
            if current is None or member.index not in current.arrived:
                return None
            part = current.buffer[low:high].view(member.shape)
            return self._handed_out.add(member, part.clone(), part, own=True)
        self.finish(Purpose.READ, member)
        if not self.touched(bucket, member):
            return None
        if bucket.whole:
            whole = bucket.total.acquire()  # no release needed: never offloaded
            values = whole[low:high].view(member.shape)
            return self._handed_out.add(member, values.clone(), values)
        with bucket.total.borrowed() as total:
            dense = member.group.assemble(member, total, READ, f"gradient of {member.name}")
        return self._handed_out.add(member, dense.view(member.shape))

    def forget_reads(self, member: ParamRecord) -> None:
        """Stop tracking the reads of a parameter's gradient, since it is about to be replaced."""
        self._handed_out.forget(member)

    def set_grad(self, member: ParamRecord, value: torch.Tensor | None) -> None:
        """Replace a parameter's accumulated gradient. All ranks must call this.

        Args:
            member: parameter.
            value: gradient in the parameter's shape; None: no gradient.

        Raises:
            UsageError: the parameter's group is frozen, or ranks have made different calls.
        """
        bucket = self.bucket_of(member.group)
        if value is None and (self.clean or bucket.sum is None):
            return
        self._mark(member, value is not None)
        if value is not None or bucket.filled:
            self._write(member, value)

    def set_local_grad(self, member: ParamRecord, value: torch.Tensor) -> None:
        """Replace this rank's part of a parameter's accumulated gradient. All ranks must call this.

        Args:
            member: parameter.
            value: tensor with the elements of this rank's shard; ignored if it has none.

        Raises:
            UsageError: as in `set_grad`.
        """
        self._mark(member, True)
        self._write(member, value, is_part=True)

    def _mark(self, member: ParamRecord, has_gradient: bool) -> None:
        """Reduce the gradients before one is replaced, and record whether the parameter then has one on all ranks."""
        bucket = self.bucket_of(member.group)
        if bucket.sum is None:
            raise UsageError(f"parameter '{member.name}' is frozen, and so has no gradient that could be replaced")
        self.clean = False
        self.forget_reads(member)
        self.finish(Purpose.WRITE, member)
        bucket.touched[member.index] = int(has_gradient)
        self.revision += 1
        self._touched_anywhere[id(bucket)][member.index] = has_gradient

    def _write(self, member: ParamRecord, value: torch.Tensor | None, is_part: bool = False) -> None:
        """Write this rank's part of a gradient to the accumulator; None: zeros. `value` may be this part itself."""
        bucket = self.bucket_of(member.group)
        flat = None if value is None else value.detach().reshape(-1)
        with bucket.total.borrowed(changed=True, read=bucket.filled) as total:
            if not bucket.filled:
                total.zero_()
            range_ = member.group.layout.range_of(member.index, bucket.low, bucket.high)
            if range_ is not None:
                start = range_.group_start - bucket.low
                place = total[start : start + range_.numel]
                if flat is None:
                    place.zero_()
                else:
                    place.copy_(flat if is_part else flat[range_.start : range_.stop])
        bucket.filled = True


class _GradHook:
    """Gradient hook of a parameter; has a weak reference, since the garbage collector cannot see torch's hooks."""

    def __init__(self, member: ParamRecord) -> None:
        self._member = weakref.ref(member)

    def __call__(self, _param: torch.Tensor) -> None:
        member = self._member()
        if member is not None and member.reducer is not None:
            member.reducer.arrived(member)


def _leave_to_agreement(reducer: Reducer, bucket: Bucket) -> None:
    """Do nothing for a tied weight without gradients; if other pipeline stages have some, `_catch_up` sends zeros."""


unlaunched_copies: Replaceable[Callable[[Reducer, Bucket], None]] = Replaceable(_leave_to_agreement)
