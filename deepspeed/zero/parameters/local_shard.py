"""This rank's shard of a group: its values, which may be in flight, and the master copy that the optimizer updates.

[Note: arriving] With `overlap_publish`, stages 1 and 2 on devices do not order the compute stream after the all-gather
of updated parameters. A group whose all-gather is in flight is *arriving*: its parameters have the class
`ArrivingParameter`, so that the first torch function that reads or writes one of them orders the current stream, and
the stream of the step, after the message. Hooks do the same for a whole unit before its forward
(`module_hooks.DeferredAllGatherHooks`), and the package's own reads of the buffer use the properties of
`DeferredAllGather`. If a view of the buffer is alive, the step itself waits. Users of the key must avoid uses that no
class detects: old addresses, replays of a captured graph, parameters passed to a kernel without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import Handle
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.foundation.pytree import leaves_in
from deepspeed.storage.async_copy import PendingCopy, mover_of
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.layout.layout import ShardLayout
from deepspeed.zero.layout.stages import Policy
from deepspeed.zero.parameters.parameter import ManagedParameter, reads_values
from deepspeed.zero.parameters.record import ParamRecord, Tiers


class ArrivingParameter(ManagedParameter):
    """A whole parameter whose all-gather is in flight; its first read or write waits on its stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parameters = list(leaves_in((args, kwargs), ArrivingParameter)) if reads_values(func) else []
        for param in parameters:
            param._ds_member.group.wait()
        if parameters:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def arrived(value: Any) -> Any:
    """Wait for `value` before a transform of torch.func wraps it below its class; returns it."""
    if isinstance(value, ArrivingParameter):
        value._ds_member.group.wait()
    return value


class DeferredAllGather:
    """Buffer access of a group whose all-gather may be in flight: every access is ordered after the all-gather.

    Attributes:
        full: the full buffer.
        views: views of the parameters in the full buffer.
        values: this rank's shard.
    """

    members: list[ParamRecord]
    _full: torch.Tensor
    _views: list[torch.Tensor]
    _values: StoredTensor
    _arriving: tuple[Handle, Any] | None = None  # the all-gather, and the stream of the step

    @property
    def full(self) -> torch.Tensor:
        """Return the full buffer: one flat tensor of the compute dtype."""
        if self._arriving is not None:
            self.wait()
        return self._full

    @full.setter
    def full(self, full: torch.Tensor) -> None:
        self._full = full

    @property
    def views(self) -> list[torch.Tensor]:
        """Return the parameters' views of the full buffer, in their shapes; valid whenever the buffer has memory."""
        if self._arriving is not None:
            self.wait()
        return self._views

    @views.setter
    def views(self, views: list[torch.Tensor]) -> None:
        self._views = views

    @property
    def values(self) -> StoredTensor:
        """Return this rank's shard of the values."""
        if self._arriving is not None:
            self.wait()
        return self._values

    @values.setter
    def values(self, values: StoredTensor) -> None:
        self._values = values

    def arrive(self, all_gather: Handle) -> None:
        """Record a pending all-gather of new values; the current stream is that of the step."""
        self._arriving = all_gather, get_accelerator().current_stream()
        for member in self.members:
            if member.param.__class__ is ManagedParameter:
                member.param.__class__ = ArrivingParameter

    def wait(self) -> None:
        """Order the stream of the step and the current stream after the values."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        for member in self.members:
            if member.param.__class__ is ArrivingParameter:
                member.param.__class__ = ManagedParameter
        all_gather, home = arriving
        accelerator = get_accelerator()
        reader = accelerator.current_stream()
        if reader == home:
            all_gather.wait()
            return
        with accelerator.stream(home):
            all_gather.wait()
        reader.wait_stream(home)


class LocalShard(DeferredAllGather):
    """This rank's shard of a group in storage tiers. `values` is a view of the full buffer if that is permanent.

    Attributes:
        master: the copy that the optimizer updates; None if it updates the shard itself.
        low: first element of the group that this rank updates.
        high: one past the last.
    """

    axis: Axis
    policy: Policy
    layout: ShardLayout
    tiers: Tiers
    name: str
    dtype: torch.dtype
    device: torch.device
    master: StoredTensor | None = None
    low: int
    high: int
    owes_own = False  # the own shard is on its way from its tier, and not in the full buffer yet
    _brings = False  # … and comes straight to its place there
    _staged: torch.Tensor | None = None
    value_mask: Callable[[torch.Tensor], None] | None = None  # masks the values that are made of a master

    def settle_values(self, values: torch.Tensor) -> None:
        """Store the shard, 1-D and of the compute dtype, in its tier."""
        label = f"values of {self.name}"
        self.values = self.tiers.parameters.store(label, values.numel(), self.dtype, self.device)
        self.values.replace(values)

    @property
    def overlaps_all_gather(self) -> bool:
        """Return whether the all-gather of updated values overlaps computation."""
        return self.policy.all_gathers_after_step and self.between_devices

    @property
    def between_devices(self) -> bool:
        """Return whether streams, not the host, wait for its messages."""
        return self.axis.size > 1 and self.axis.group is not None and not self.axis.tagged

    # -- the own shard, to its place in the full buffer -----------------------------------------------------------

    def expect_own(self) -> None:
        """Start to load the shard from its tier, directly into the full buffer if it is the only target."""
        self.owes_own = True
        alone = self.axis.size == 1 and self.device.type == "cpu"
        self._brings = alone and self.values.bring(self._own_place)
        if not self._brings:
            self.values.prefetch()

    def bring_own(self) -> PendingCopy | None:
        """Copy the shard into the full buffer; from another device, returns the pending copy."""
        self.owes_own = False
        if self._brings:
            self._brings = False
            self.values.brought()
            return None
        place = self._own_place
        with self.values.borrowed() as values:
            if values.device == self.device:
                place.copy_(values)
                return None
            arrival = mover_of(self.device).copy(place, values)
            self.values.use_until(arrival)
            return arrival

    @property
    def _own_place(self) -> torch.Tensor:
        cuts, rank = self.layout.cuts, self.axis.rank
        return self.full[cuts[rank] : cuts[rank + 1]]

    # -- values and master ----------------------------------------------------------------------------------------

    def overwrite_master(self, member: ParamRecord, values: torch.Tensor) -> None:
        """Copy one member's values, dense and flat, into the master, if there is one."""
        range_ = self.layout.range_of(member.index, self.low, self.high)
        if self.master is None or range_ is None:
            return
        with self.master.borrowed(changed=True) as master:
            start = range_.group_start - self.low
            master[start : start + range_.numel].copy_(values[range_.start : range_.stop])

    def import_edits(self, member: ParamRecord) -> None:
        """Copy the values of a whole member that differ from the rounded master into the master."""
        range_ = self.layout.range_of(member.index, self.low, self.high)
        if self.master is None or range_ is None:
            return
        with self.master.borrowed(changed=True) as lent:
            master = lent[range_.group_start - self.low :][: range_.numel]
            values = self.full[member.offset + range_.start : member.offset + range_.stop].to(master.device)
            same = self._seen(lent)[range_.group_start - self.low :][: range_.numel] == values
            torch.where(same, master, values.to(master.dtype), out=master)

    def _seen(self, master: torch.Tensor) -> torch.Tensor:
        """Return the parameter values to which a master is rounded."""
        seen = master.to(self.dtype, copy=self.value_mask is not None)
        if self.value_mask is not None:
            self.value_mask(seen)
        return seen

    def add_master(self, dtype: torch.dtype) -> StoredTensor | None:
        """Allocate a master of zeros, unless the values themselves can be updated in their tier."""
        if self.master is None and (dtype != self.dtype or self._apart):
            label = f"master of {self.name}"
            self.master = self.tiers.optimizer.store(label, self.high - self.low, dtype, self.device)
        return self.master

    def split_master(self) -> bool:
        """Create a master separate from the values although they have its dtype; returns whether it was created now."""
        if self.master is not None:
            return False
        label = f"master of {self.name}"
        self.master = self.tiers.optimizer.store(label, self.high - self.low, self.dtype, self.device)
        with self.master.borrowed(changed=True, read=False) as master, self.values.borrowed() as values:
            master.copy_(values)
        return True

    @property
    def _apart(self) -> bool:
        """Return whether the values are in another tier than the updated copy."""
        rests = self.tiers.parameters if self.policy.gathers_before_use else RESIDENT
        return rests is not self.tiers.optimizer

    @property
    def under_leaves(self) -> StoredTensor | None:
        """Return the memory of the optimizer's leaves; None for a frozen group without a master in its tier."""
        return None if self.master is None and self._apart else self.updated

    def thaw(self, dtype: torch.dtype) -> None:
        """Create the master of a group that was frozen, from its values."""
        if self.master is not None:
            return
        new_master = self.add_master(dtype if dtype.itemsize > self.dtype.itemsize else self.dtype)
        if new_master is not None:
            with new_master.borrowed(changed=True, read=False) as master, self.values.borrowed() as values:
                master.copy_(values)

    @property
    def updated(self) -> StoredTensor:
        """Return the copy that the optimizer updates: the master, or the values themselves without a master."""
        return self.values if self.master is None else self.master

    def round_masters(self) -> None:
        """Cast updated masters to the compute dtype."""
        if self.master is not None:
            with self.master.borrowed() as master, self.values.borrowed(changed=True, read=False) as values:
                if values.device == master.device or self.tiers.optimizer.pool is None:
                    values.copy_(master)
                else:
                    mover_of(self.device).deliver(values, master, self.tiers.optimizer.pool)
        self.mask_values()

    def stage_rounded(self, keeps: bool) -> torch.Tensor | None:
        """Return a host buffer for rounded masters, until `deliver_staged`; `keeps`: not all of it is overwritten."""
        pool = self.tiers.optimizer.pool
        if pool is None or self.master is None:
            return None
        self._staged = pool.take(self.values.numel * self.dtype.itemsize).view(self.dtype)
        if keeps:
            with self.master.borrowed() as master:
                self._staged.copy_(master)
        return self._staged

    def deliver_staged(self) -> None:
        """Copy the staged values asynchronously; the current stream is ordered after the copy."""
        staged, self._staged = self._staged, None
        if staged is not None and self.tiers.optimizer.pool is not None:
            with self.values.borrowed(changed=True, read=False) as values:
                arrival = mover_of(self.device).copy(values, staged)
            arrival.before_current()
            self.tiers.optimizer.pool.put(staged, after=arrival)

    def drop_staged(self) -> None:
        """Return the staging buffer of an update that failed."""
        staged, self._staged = self._staged, None
        if staged is not None and self.tiers.optimizer.pool is not None:
            self.tiers.optimizer.pool.put(staged)

    def mask_values(self) -> None:
        """Mask the values that were derived from the master."""
        if self.value_mask is not None and self.master is not None:
            with self.values.borrowed(changed=True) as values:
                self.value_mask(values)
