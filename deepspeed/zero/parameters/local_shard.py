"""Shard of a parameter group on one rank: its values in the model's dtype, and the master weights.

[Note: arriving] With `overlap_publish`, stages 1 and 2 on devices, and of CPU ranks on several hosts, do not wait at
the end of a step for the all-gather of the updated parameters. While it is in progress, the group is called arriving,
and its parameters have the class `ArrivingParameter`: the first torch function that reads or writes one of them makes
the current stream and the stream of the step wait for the all-gather. Before the forward of a unit, hooks wait for all
its groups (`module_hooks.DeferredAllGatherHooks`), and code of this package reads the buffer by the properties of
`DeferredAllGather`, which wait too. If a view of the buffer exists, the step itself waits. Accesses that do not use
torch functions cannot be detected, and must be avoided: stored addresses, replays of CUDA graphs, custom kernels.
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
from deepspeed.zero.parameters.encoded_weights import EncodedWeights
from deepspeed.zero.parameters.parameter import ManagedParameter, reads_values
from deepspeed.zero.parameters.record import ParamRecord, Tiers


class ArrivingParameter(ManagedParameter):
    """Unsharded parameter with an all-gather in progress; the stream of its first read or write waits for it."""

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
    """Return `value`; if it is an `ArrivingParameter`, wait for its all-gather. Used before torch.func wraps it."""
    if isinstance(value, ArrivingParameter):
        value._ds_member.group.wait()
    return value


class DeferredAllGather:
    """Buffers of a group with an all-gather that may be in progress; the properties wait for it.

    Attributes:
        full: full buffer with all parameters.
        views: one view of the full buffer per parameter.
        values: this rank's shard.
    """

    members: list[ParamRecord]
    _full: torch.Tensor
    _views: list[torch.Tensor]
    _values: StoredTensor
    _arriving: tuple[Handle, Any] | None = None  # all-gather in progress, and stream of the step

    @property
    def full(self) -> torch.Tensor:
        """Return the full buffer: the group's concatenated parameters as a 1-D tensor of the compute dtype."""
        if self._arriving is not None:
            self.wait()
        return self._full

    @full.setter
    def full(self, full: torch.Tensor) -> None:
        self._full = full

    @property
    def views(self) -> list[torch.Tensor]:
        """Return one view of the full buffer per parameter, in its shape; valid while the group is gathered."""
        if self._arriving is not None:
            self.wait()
        return self._views

    @views.setter
    def views(self, views: list[torch.Tensor]) -> None:
        self._views = views

    @property
    def values(self) -> StoredTensor:
        """Return this rank's shard of the values, 1-D, in the compute dtype."""
        if self._arriving is not None:
            self.wait()
        return self._values

    @values.setter
    def values(self, values: StoredTensor) -> None:
        self._values = values

    def arrive(self, all_gather: Handle) -> None:
        """Record an all-gather of new values in progress, to be waited for later; the current stream started it."""
        self._arriving = all_gather, get_accelerator().current_stream()
        for member in self.members:
            if member.param.__class__ is ManagedParameter:
                member.param.__class__ = ArrivingParameter

    def wait(self) -> None:
        """Make the stream of the step and the current stream wait for a recorded all-gather, if there is one."""
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
    """Shard of a parameter group on this rank, and its master weights.

    `values` is a view of the full buffer if the group is never resharded (stages 0 to 2).

    Attributes:
        master: master weights, which the optimizer updates; None if it updates `values`.
        low: index in the group of the first element that this rank updates.
        high: index after the last element that this rank updates.
        encoded: encoded form of the values in all-gathers; None: they are sent as they are.
        decoded: whether the full buffer holds decoded values.
    """

    axis: Axis
    policy: Policy
    layout: ShardLayout
    tiers: Tiers
    name: str
    dtype: torch.dtype
    device: torch.device
    master: StoredTensor | None = None
    encoded: EncodedWeights | None = None
    decoded = False
    low: int
    high: int
    owes_own = False  # this rank's shard is being loaded from its tier, and is not in the full buffer yet
    _brings = False  # it is loaded directly into the full buffer
    _staged: torch.Tensor | None = None  # rounded master weights in host memory
    value_mask: Callable[[torch.Tensor], None] | None = None  # prunes values that are rounded from master weights

    def settle_values(self, values: torch.Tensor) -> None:
        """Store the shard in its tier; `values` is a 1-D tensor of the compute dtype."""
        label = f"values of {self.name}"
        self.values = self.tiers.parameters.store(label, values.numel(), self.dtype, self.device)
        self.values.replace(values)

    @property
    def overlaps_all_gather(self) -> bool:
        """Return whether the all-gather after a step can overlap with computation.

        That of CPU ranks on several hosts can if it has one step: its messages travel without this thread.
        """
        on_hosts = self.axis.tagged and self.axis.shared is None and self.axis.size > 1
        alone = on_hosts and (self.encoded is None or not self.encoded.in_two_steps)
        return self.policy.all_gathers_after_step and (self.between_devices or alone)

    @property
    def between_devices(self) -> bool:
        """Return whether the group is communicated between devices, so that streams wait for it, not the host."""
        return self.axis.size > 1 and self.axis.group is not None and not self.axis.tagged

    # -- copy of the shard into the full buffer -------------------------------------------------------------------

    def expect_own(self) -> None:
        """Start to load the shard from its tier; on a single CPU rank, directly into the full buffer if possible."""
        self.owes_own = True
        alone = self.axis.size == 1 and self.device.type == "cpu"
        self._brings = alone and self.values.bring(self._own_place)
        if not self._brings:
            self.values.prefetch()

    def bring_own(self) -> PendingCopy | None:
        """Copy the shard into the full buffer.

        Returns:
            Copy in progress if the shard is stored on another device; None: the copy has finished.
        """
        self.owes_own = False
        if self._brings:
            self._brings = False
            self.values.brought()
            return None
        place = self._own_place
        if self.tiers.parameters is RESIDENT:  # always at hand
            place.copy_(self.values.acquire())
            return None
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

    # -- values and master weights --------------------------------------------------------------------------------

    def overwrite_master(self, member: ParamRecord, values: torch.Tensor) -> None:
        """Copy this rank's part of a parameter's values into the master weights, if there are any.

        Args:
            member: parameter.
            values: all elements of the parameter, 1-D.
        """
        range_ = self.layout.range_of(member.index, self.low, self.high)
        if self.master is None or range_ is None:
            return
        with self.master.borrowed(changed=True) as master:
            start = range_.group_start - self.low
            master[start : start + range_.numel].copy_(values[range_.start : range_.stop])

    def import_edits(self, member: ParamRecord) -> None:
        """Copy a gathered parameter's elements into the master weights where the rounded master weights differ."""
        range_ = self.layout.range_of(member.index, self.low, self.high)
        if self.master is None or range_ is None:
            return
        with self.master.borrowed(changed=True) as lent:
            master = lent[range_.group_start - self.low :][: range_.numel]
            values = self.full[member.offset + range_.start : member.offset + range_.stop].to(master.device)
            same = self._seen(lent)[range_.group_start - self.low :][: range_.numel] == values
            torch.where(same, master, values.to(master.dtype), out=master)

    def _seen(self, master: torch.Tensor) -> torch.Tensor:
        """Return master weights rounded to the compute dtype, pruned and decoded, as the model uses them."""
        seen = master.to(self.dtype, copy=self.value_mask is not None)
        if self.value_mask is not None:
            self.value_mask(seen)
        return self.encoded.published(seen) if self.encoded is not None and self.decoded else seen

    def add_master(self, dtype: torch.dtype) -> StoredTensor | None:
        """Allocate master weights (zeros) if they have another dtype or storage tier than the values.

        Args:
            dtype: dtype of the master weights.

        Returns:
            Master weights; None: the optimizer updates the values.
        """
        if self.master is None and (dtype != self.dtype or self._apart):
            label = f"master of {self.name}"
            self.master = self.tiers.optimizer.store(label, self.high - self.low, dtype, self.device)
        return self.master

    def split_master(self) -> bool:
        """Create master weights of the same dtype as the values; returns False if there are master weights already."""
        if self.master is not None:
            return False
        label = f"master of {self.name}"
        self.master = self.tiers.optimizer.store(label, self.high - self.low, self.dtype, self.device)
        with self.master.borrowed(changed=True, read=False) as master, self.values.borrowed() as values:
            master.copy_(values)
        return True

    @property
    def _apart(self) -> bool:
        """Return whether master weights are needed beside values of the same dtype."""
        if self.encoded is not None and self.policy.all_gathers_after_step:
            return True  # the values become decoded ones
        rests = self.tiers.parameters if self.policy.gathers_before_use else RESIDENT
        return rests is not self.tiers.optimizer

    @property
    def under_leaves(self) -> StoredTensor | None:
        """Return the tensor of which the optimizer's leaves are views; None for a frozen group in another tier."""
        return None if self.master is None and self._apart else self.updated

    def thaw(self, dtype: torch.dtype) -> None:
        """Create the master weights of a group that was frozen, and copy its values into them.

        They have `dtype`, or the dtype of the values if `dtype` is not wider. None are created if they would equal the
        values in dtype and tier.
        """
        if self.master is not None:
            return
        new_master = self.add_master(dtype if dtype.itemsize > self.dtype.itemsize else self.dtype)
        if new_master is not None:
            with new_master.borrowed(changed=True, read=False) as master, self.values.borrowed() as values:
                master.copy_(values)

    @property
    def updated(self) -> StoredTensor:
        """Return the tensor that the optimizer updates: the master weights, or `values` if there are none."""
        return self.values if self.master is None else self.master

    def round_masters(self) -> None:
        """Round the master weights to the compute dtype and store them in `values`, then apply the pruning mask."""
        if self.master is not None:
            with self.master.borrowed() as master, self.values.borrowed(changed=True, read=False) as values:
                if values.device == master.device or self.tiers.optimizer.pool is None:
                    values.copy_(master)
                else:
                    mover_of(self.device).deliver(values, master, self.tiers.optimizer.pool)
        self.mask_values()

    def stage_rounded(self, keeps: bool) -> torch.Tensor | None:
        """Borrow a host buffer for rounded master weights, until `deliver_staged`.

        Args:
            keeps: fill it with the rounded master weights, since the caller does not overwrite all elements.

        Returns:
            1-D tensor of the compute dtype; None without master weights, or if the optimizer state is not offloaded.
        """
        pool = self.tiers.optimizer.pool
        if pool is None or self.master is None:
            return None
        self._staged = pool.take(self.values.numel * self.dtype.itemsize).view(self.dtype)
        if keeps:
            with self.master.borrowed() as master:
                self._staged.copy_(master)
        return self._staged

    def deliver_staged(self) -> None:
        """Start to copy the buffer of `stage_rounded` into `values`; the current stream waits for the copy."""
        staged, self._staged = self._staged, None
        if staged is not None and self.tiers.optimizer.pool is not None:
            with self.values.borrowed(changed=True, read=False) as values:
                arrival = mover_of(self.device).copy(values, staged)
            arrival.before_current()
            self.tiers.optimizer.pool.put(staged, after=arrival)

    def drop_staged(self) -> None:
        """Return the buffer of `stage_rounded` to its pool without a copy, after a failed update."""
        staged, self._staged = self._staged, None
        if staged is not None and self.tiers.optimizer.pool is not None:
            self.tiers.optimizer.pool.put(staged)

    def mask_values(self) -> None:
        """Apply the pruning mask to values that were rounded from master weights."""
        if self.value_mask is not None and self.master is not None:
            with self.values.borrowed(changed=True) as values:
                self.value_mask(values)
