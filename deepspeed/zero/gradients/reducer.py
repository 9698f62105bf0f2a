"""Collection of gradients from autograd hooks into buckets, and their reduction."""

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
from deepspeed.zero.gradients.accumulation import AccumulationWindow, Agreed, Purpose, disagreement
from deepspeed.zero.gradients.buckets import (
    Bucket,
    BucketRow,
    ReduceSettings,
    ReductionRound,
    SumOfSquaresCache,
    add_rows,
    can_add,
)
from deepspeed.zero.gradients.grad_views import GradViewTracker
from deepspeed.zero.gradients.rank_agreement import GradAgreement, RankComparison, Rows
from deepspeed.zero.gradients.reduce_scatter import GradReduceScatter
from deepspeed.zero.parameters.parallel_groups import ParallelGroups
from deepspeed.zero.parameters.parameter import raw_grad, set_raw_grad
from deepspeed.zero.parameters.record import ParameterGroup, ParamRecord
from deepspeed.zero.parameters.replaced_parameters import Replaced
from deepspeed.zero.parameters.shard_group import ShardGroup


class GradScale(NamedTuple):
    """Dtype and factors for gradients of a bucket."""

    dtype: torch.dtype  # of the round
    exact: bool  # that is the accumulator's
    pre_reduce_scale: float  # factor on the gradient
    post_reduce_scale: float  # factor on the sum
    sends_now: bool  # the round is sent when it is complete


class GradScales:
    """Dtype and factors for gradients of each kind of bucket, computed once per state of the window."""

    def __init__(self, settings: ReduceSettings, window: AccumulationWindow) -> None:
        self._settings, self._window = settings, window
        self._made: dict[tuple[torch.dtype, bool], GradScale] = {}  # by kind of bucket, of one revision of the window
        self._revision = window.revision

    def of(self, bucket: Bucket) -> GradScale:
        """Return the scaling of a gradient that arrives now."""
        if self._revision != self._window.revision:
            self._revision = self._window.revision
            self._made.clear()
        entry = self._made.get(bucket.kind)
        if entry is None:
            entry = self._made[bucket.kind] = self._form(bucket)
        return entry

    def _form(self, bucket: Bucket) -> GradScale:
        settings, window = self._settings, self._window
        if self.summed_first(bucket) or window.weight is not None:
            dtype = settings.accumulator
        else:
            dtype = settings.comm_dtype or bucket.group.dtype
        exact = dtype == settings.accumulator
        if exact:
            at_entry, at_owner = window.factor * (1.0 if window.weight is None else window.weight), 1.0
        else:
            at_entry, at_owner = self.prescale, window.factor / self.prescale
        sends_now = window.reduce_now or bucket.group.policy.reduces_as_gradients_arrive
        return GradScale(dtype, exact, at_entry, at_owner, sends_now)

    def summed_first(self, bucket: Bucket) -> bool:
        """Return whether several micro-batches are summed before the reduction."""
        return self._window.deferred and not bucket.group.policy.reduces_as_gradients_arrive

    @property
    def prescale(self) -> float:
        """Return the factor on low-precision gradients before the reduction."""
        return 1.0 if self._settings.prescale is None else self._settings.prescale


class Reducer:
    """Collects, reduces and accumulates the gradients of an engine."""

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
            Bucket(group, settings.accumulator, settings.accumulates, not settings.in_rank_order) for group in groups
        ]
        self._of = {id(b.group): b for b in self.buckets}
        self.clean = True
        self.revision = 0  # changes whenever what ranks compare may have changed
        self._launched = -1  # at this revision no round was open
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
        self.muted = False  # gradients that arrive are dropped: backward is run again to look at it
        self._entries = GradScales(settings, window)
        self.replaced = Replaced(self.listen, self.arrived)
        for group in groups:
            for member in group.members:
                member.reducer = self
                self.listen(member)

    # -- arrival --------------------------------------------------------------------------------------------------

    def listen(self, member: ParamRecord, anew: bool = False) -> None:
        """Register the gradient hook of a parameter (`anew`: again, because the parameter has a new tensor)."""
        if anew and member.uid in self._hooks:
            self._hooks.pop(member.uid).remove()
            param: Any = member.param
            param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
        if member.param.requires_grad and member.uid not in self._hooks:
            self._of[id(member.group)].prepare()
            self.revision += 1
            self._hooks[member.uid] = member.param.register_post_accumulate_grad_hook(_GradHook(member))

    def arrived(self, member: ParamRecord) -> None:
        """Take a gradient that autograd has finished."""
        gradient = raw_grad(member.param)
        if gradient is None:
            return
        if collectives.PLANTED_DELAY is not None:
            collectives.delay(f"gradient of {member.name}")
        set_raw_grad(member.param, None)
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
        if gradient.requires_grad:  # `create_graph=True`: what is summed over ranks has no graph
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
        """Copy or add one gradient to the open round."""
        current, index = bucket.round, member.index
        if current is not None:
            again = not how.exact and index in current.arrived  # a sum in low precision would round
            if again or current.buffer.dtype != how.dtype or current.post_reduce_scale != how.post_reduce_scale:
                self._launch(bucket)
                current = None
        if current is None:
            current = bucket.round = self._open(bucket, how.dtype, how.post_reduce_scale)
        if member.padded:
            gradient = member.without_padding(gradient)
        place = bucket.place(current.buffer, index)
        if gradient.is_sparse:
            add_rows(place, gradient, how.pre_reduce_scale, index in current.arrived)
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
        expected = [member.param.requires_grad for member in bucket.group.members].count(True)
        local = bucket.local
        if local is not None and local.dtype == dtype and not bucket.filled and not self.reduce_scatter.busy(bucket):
            return ReductionRound(local, at_owner, False, expected)
        return ReductionRound(self.reduce_scatter.acquire(bucket, dtype), at_owner, True, expected)

    def _launch(self, bucket: Bucket) -> None:
        """Send the open round of a bucket."""
        current, bucket.round = bucket.round, None
        if current is not None:
            current = self._narrowed(bucket, current)
            if current.buffer.dtype != self.settings.accumulator:
                bucket.note_factor(current.post_reduce_scale)
            self.reduce_scatter.launch(bucket, current)

    def _narrowed(self, bucket: Bucket, current: ReductionRound) -> ReductionRound:
        """Return the round in the communication dtype; converts a round that was summed in another dtype."""
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
        """Send open rounds, send missing rounds as zeros, and wait. Collective over ranks with `of` (None: all)."""
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
        """Drop the window and raise the same error on all ranks."""
        self.reduce_scatter.settle()
        self.clear()
        self.window.restart()
        raise UsageError(f"{trouble}; nothing was updated, and the window's gradients are dropped")

    def _launch_open(self) -> None:
        """Send the open rounds."""
        if self._launched == self.revision:
            return  # one read of a gradient after another
        if self._handed_out.used:
            self._handed_out.close(own=True)
        for bucket in self.buckets:
            if bucket.round is not None:
                self._launch(bucket)
            elif bucket.group.ranks.across_stages and not self.clean:
                unlaunched_copies.current(self, bucket)
        self._launched = self.revision

    def _catch_up(self, meeting: RankComparison, rows: Rows) -> None:
        """Send zeros for rounds that only other ranks have launched, and send the queued rounds."""
        if rows.equal:
            self._touched_anywhere |= {id(bucket): bytearray(bucket.touched) for bucket in meeting.buckets}
        else:
            for bucket, table in zip(meeting.buckets, rows.by_bucket(meeting.buckets), strict=True):
                self._even_out(bucket, table)
            self._launched = self.revision = self.revision + 1
        if meeting.order is not None:
            meeting.order.flush([bucket for bucket in meeting.buckets if any(self._touched_anywhere[id(bucket)])])

    def _even_out(self, bucket: Bucket, table: list[BucketRow]) -> None:
        """Send zero rounds until this rank has launched as many rounds of a bucket as any other."""
        factor = max(row.factor for row in table)
        for exact in (0, 1):
            while bucket.launches[exact] < max(row.launches[exact] for row in table):
                bucket.prepare()  # nothing to do, unless the group is frozen here alone; then all raise
                self.send_zeros(bucket, exact, factor)
        columns = zip(*(row.touched for row in table), strict=True)
        self._touched_anywhere[id(bucket)] = bytearray(any(column) for column in columns)

    def send_zeros(self, bucket: Bucket, exact: int, factor: float) -> None:
        low = self.settings.comm_dtype or bucket.group.dtype
        dtype = self.settings.accumulator if exact else low
        at_owner = 1.0 if exact else abs(factor) or 1.0
        bucket.round = ReductionRound(self.reduce_scatter.acquire(bucket, dtype), at_owner, pooled=True)
        self._launch(bucket)

    def marks(self, bucket: Bucket) -> bytearray | None:
        """Return one mark per parameter of a group for which any rank had a gradient; valid after `finish`."""
        return self._touched_anywhere.get(id(bucket))

    def touched(self, bucket: Bucket, member: ParamRecord) -> bool:
        """Return whether any rank had a gradient for `member` in the window; valid after `finish`."""
        marks = self.marks(bucket)
        return bool(marks and marks[member.index])

    def _adopt_edits(self, of: ParamRecord | None = None) -> None:
        """Add in-place changes of read gradients to the accumulator; no gradient was added since the read."""
        for member, tensor, own in self._handed_out.take_edited(of):
            current = self.bucket_of(member.group).round
            if not own:
                self._write(member, tensor)
            elif current is not None:
                current.buffer[member.offset : member.offset + member.numel] = tensor.reshape(-1)

    def clear(self) -> None:
        """Reset the window; the next gradients overwrite its sums."""
        for bucket in self.buckets:
            bucket.clear()
        self._touched_anywhere.clear()
        self.revision += 1
        if self._handed_out.used:
            self._handed_out.clear()
        self.clean = True
        self.window.forget()

    def drop(self) -> None:
        """Drop the gradients of the window (`zero_grad`). All ranks must call this."""
        if not self.clean:
            self.finish(Purpose.ZERO_GRAD)
            self.clear()
        self.window.forget()

    def time_waits(self, timer: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter `timer()` around each wait for gradients in flight."""
        self._wait_timer = timer

    def set_accumulates(self, accumulates: bool) -> None:
        self.settings = self.reduce_scatter.settings = replace(self.settings, accumulates=accumulates)

    def detach(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.reduce_scatter.close()

    # -- what users see -------------------------------------------------------------------------------------------

    def bucket_of(self, group: ParameterGroup) -> Bucket:
        return self._of[id(group)]

    def grad_of(self, member: ParamRecord) -> torch.Tensor | None:
        """Return the mean gradient of the window so far, in the parameter's shape; see `ManagedParameter.grad`."""
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
            whole = bucket.total.acquire()  # where everything is whole, nothing rests elsewhere
            values = whole[low:high].view(member.shape)
            return self._handed_out.add(member, values.clone(), values)
        with bucket.total.borrowed() as total:
            dense = member.group.assemble(member, total, READ, f"gradient of {member.name}")
        return self._handed_out.add(member, dense.view(member.shape))

    def forget_reads(self, member: ParamRecord) -> None:
        """Stop tracking reads of a sum that is about to be replaced."""
        self._handed_out.forget(member)

    def set_grad(self, member: ParamRecord, value: torch.Tensor | None) -> None:
        """Replace the window's gradient of `member` by `value` (None: no gradient). All ranks must call this."""
        bucket = self.bucket_of(member.group)
        if bucket.sum is None:
            if value is None:
                return
            raise UsageError(f"parameter '{member.name}' is frozen, and so has no gradient that could be replaced")
        if value is None and self.clean:
            return
        self.clean = False
        self.forget_reads(member)
        self.finish(Purpose.WRITE, member)
        bucket.touched[member.index] = int(value is not None)
        self.revision += 1
        self._touched_anywhere[id(bucket)][member.index] = value is not None
        if value is not None or bucket.filled:
            self._write(member, value)

    def _write(self, member: ParamRecord, value: torch.Tensor | None) -> None:
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
                    place.copy_(flat[range_.start : range_.stop])
        bucket.filled = True


class _GradHook:
    """Gradient hook of a parameter; holds weak references, since garbage collection does not see torch's hooks."""

    def __init__(self, member: ParamRecord) -> None:
        self._member = weakref.ref(member)

    def __call__(self, _param: torch.Tensor) -> None:
        member = self._member()
        if member is not None and member.reducer is not None:
            member.reducer.arrived(member)


def _leave_to_agreement(reducer: Reducer, bucket: Bucket) -> None:
    """Do nothing: other stages may have gradients for this copy, and `Reducer._catch_up` then sends zeros."""


unlaunched_copies: Replaceable[Callable[[Reducer, Bucket], None]] = Replaceable(_leave_to_agreement)
