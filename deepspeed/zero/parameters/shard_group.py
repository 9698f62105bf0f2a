"""Group of parameters that are all-gathered and reduced together: one flat buffer, one shard per rank.

[Note: one storage] The full buffer contains the group's concatenated, unsharded parameters. Resharding resizes its
storage to zero bytes, and gathering resizes the storage back and fills it. While other code has a view of the buffer,
the storage is not resized; see `deepspeed/zero/parameters/buffer_views.py`.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from deepspeed.comm.collectives.collectives import READ, SPREAD, Handle, spread
from deepspeed.comm.collectives.encoded import Wire
from deepspeed.comm.collectives.one_sided import FetchService, SharedSlices, meet, service_of
from deepspeed.comm.collectives.same_error import meet_before
from deepspeed.comm.process_groups.axis import tag_of
from deepspeed.errors import ShardedParameterError
from deepspeed.foundation.malloc import at_a_page, in_huge_pages, limits_addresses
from deepspeed.storage.async_copy import PendingCopy
from deepspeed.storage.device_tier import RESIDENT, Resident
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.layout.layout import ShardLayout
from deepspeed.zero.layout.stages import Policy
from deepspeed.zero.parameters.buffer_views import BufferViews
from deepspeed.zero.parameters.collective_order import GatherOrder
from deepspeed.zero.parameters.forward_gathers import ForwardGathers
from deepspeed.zero.parameters.functorch import feed_transforms, outside_transforms
from deepspeed.zero.parameters.parallel_groups import GroupRanks, name_on_all_ranks
from deepspeed.zero.parameters.parameter import (
    ManagedParameter,
    ShardedParameter,
    dense_copy,
    manage,
    reject_functionalize,
    reject_write,
    set_raw_class,
    set_raw_data,
    unmanage,
    was_replaced,
)
from deepspeed.zero.parameters.record import Gatherer, ParamRecord, Tiers, ZeroParamStatus


class State(enum.Enum):
    """State of a group's full buffer."""

    SHARDED = "sharded"
    INFLIGHT = "in flight"
    GATHERED = "gathered"


_first_changes = itertools.count(1 << 32, 1 << 32)
_STATUS = {
    State.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    State.INFLIGHT: ZeroParamStatus.INFLIGHT,
    State.GATHERED: ZeroParamStatus.AVAILABLE,
}


class ShardGroup(ForwardGathers):
    """Group of parameters with the same sharding policy.

    The constructor takes over the parameters: they become views of the full buffer, and are sharded at stage 3.

    Args:
        ranks: process groups that shard and replicate the parameters.
        policy: sharding policy.
        layout: shard boundaries of the concatenated parameters.
        members: records of the parameters, in the order of the layout, with values in `param.data`.
        dtype: compute dtype, to which the values are cast; None: dtype of the parameters.
        master: dtype of the master weights; None: no master weights. There are none either if this is the compute dtype
            and values and optimizer state have the same storage tier.
        tiers: storage tiers; None: the device.
        wire: codecs of all-gathers; None: values are sent as they are.
    """

    def __init__(
        self,
        ranks: GroupRanks,
        policy: Policy,
        layout: ShardLayout,
        members: list[ParamRecord],
        *,
        dtype: torch.dtype | None = None,
        master: torch.dtype | None = None,
        tiers: Tiers | None = None,
        wire: Wire | None = None,
    ) -> None:
        first = members[0].param
        axis = ranks.shard
        self.ranks, self.axis, self.policy, self.layout, self.members = ranks, axis, policy, layout, members
        self.offsets: Sequence[int] = layout.offsets
        self.numel = layout.padded  # elements of the full buffer
        self.dtype, self.device = dtype or first.dtype, first.device
        self.tiers = tiers or Tiers()
        self.by_rows = False  # the gradient of its one parameter, a table, is sent by rows
        self.decoded = False  # the full buffer holds decoded values, which differ from the shards
        # With offloaded parameters, or a limited address space, freed memory must be returned to the system.
        short = self.tiers.parameters is not RESIDENT or (policy.gathers_before_use and limits_addresses())
        self.own_pages = self.device.type == "cpu" and short
        self.channel, self.copies_channel = ranks.open_channels()
        names = [name_on_all_ranks(member.param, member.name) for member in (members[0], members[-1])]
        self.name = names[0] + (f" … {names[1]}" if len(members) > 1 else "")
        self._set_codec(wire)
        self.users = 0  # number of running modules and open contexts that need the values
        self.editors = 0  # number of open contexts in which changes are allowed
        self.keep_unsharded_storage = False  # resharding does not free the memory of the full buffer
        self.fetch: FetchService | SharedSlices | None = None  # one-sided all-gather; None: collective
        self._dropped: weakref.finalize | None = None
        self.lifecycle: Gatherer | None = None  # hooks of the engine that gathers the group
        self.gather_order: GatherOrder | None = None  # check of the order of all-gathers; None: not needed
        self._observer: Callable[[ShardGroup], None] | None = None
        self.changes = next(_first_changes)  # grows with each change of the shard's values; no two groups have a value
        self._handle: Handle | None = None  # all-gather in progress
        self._arrival: PendingCopy | None = None  # copy of this rank's shard from another device, in progress
        self._seq = itertools.count()
        for index, member in enumerate(members):
            member.group, member.index = self, index
            member.rest()
        self.new_buffer()
        self.state = State.GATHERED
        low, high = layout.cuts[axis.rank], layout.cuts[axis.rank + 1]
        # The elements that the optimizer updates on this rank.
        self.low, self.high = (low, high) if policy.owns_a_shard else (0, layout.padded)
        span = self.full[low:high] if policy.owns_a_shard else self.full
        self.values: StoredTensor = Resident(f"values of {self.name}", span)
        if master is not None:
            self.add_master(master)
        self._adopt()
        if policy.gathers_before_use:
            feed_transforms(dense_copy, reject_functionalize)
            self.settle_values(span)
            del span  # would count as a view of other code
            self.reshard()

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        if self._observer is not None:
            self._observer(self)

    @property
    def status(self) -> ZeroParamStatus:
        """Return the state of the full buffer as `ds_status` of the parameters."""
        return _STATUS[self.state]

    def new_buffer(self) -> None:
        """Allocate a new full buffer of zeros, and new `views` of it; parameters are not changed."""
        padded, dtype = self.layout.padded, self.dtype
        if self.own_pages:
            self.full = at_a_page(padded, dtype)
        elif self.device.type == "cpu" and not self.policy.gathers_before_use:
            self.full = in_huge_pages(padded, dtype)
        else:
            self.full = torch.zeros(padded, dtype=dtype, device=self.device)
        # One view per parameter, in its shape; valid while the storage is not resized to 0.
        self.views = [member.flat().view(member.shape) for member in self.members]
        self.buffer_views = BufferViews(self)

    def move_out(self) -> None:
        """Move an unsharded group to new memory, since tensors of other code share the present one."""
        old, views = self.full, self.views
        self.new_buffer()
        self.full.copy_(old)
        span = self.full[self.low : self.high]
        self.values = Resident(self.values.label, span)
        for member, before, view in zip(self.members, views, self.views, strict=True):
            if member.param.data_ptr() == before.data_ptr():
                member.param.data = view
                member.address = view.data_ptr()

    def _adopt(self) -> None:
        """Copy the parameters into full buffer and master weights, and make the parameters views of the buffer."""
        with self.master.borrowed(changed=True) if self.master is not None else contextlib.nullcontext():
            for member, offset in zip(self.members, self.offsets, strict=True):
                values = member.param.detach().reshape(-1)
                self.full[offset : offset + member.numel].copy_(values)
                self.overwrite_master(member, values)
        for member, view in zip(self.members, self.views, strict=True):
            member.param.data = view
            manage(member.param, member)
            member.version = member.param._version

    def write(self, member: ParamRecord, values: torch.Tensor) -> None:
        """Replace a parameter's values in shard, master weights and a gathered full buffer. All ranks must call this.

        Args:
            member: parameter.
            values: unsharded values, equal on all ranks.
        """
        flat = values.detach().reshape(-1)
        meet_before_change([self])
        self.overwrite_master(member, flat)
        if self.state is State.GATHERED or self.buffer_views.lent or self.buffer_views.saved:
            self.buffer_views.check_no_unsaved_writes()
            member.flat().copy_(flat)
            self.buffer_views.snapshot([member])
        if self.policy.gathers_before_use:
            cuts, rank = self.layout.cuts_of(member.index), self.axis.rank
            with self.values.borrowed(changed=True) as lent:
                lent[member.own_span()].copy_(flat[cuts[rank] : cuts[rank + 1]])

    # -- gather and reshard ---------------------------------------------------------------------------------------

    def expect_gather(self) -> None:
        """Start to read an offloaded shard that a collective all-gather will need soon."""
        if self.state is State.SHARDED and self.fetch is None and self.axis.size > 1 and self.values.memory is None:
            self.values.prefetch()

    @outside_transforms
    def start_all_gather(self, encoded: bool = False) -> None:
        """Start the all-gather, unless the group is gathered or in flight; collective unless `fetch` is set.

        Args:
            encoded: for a forward or backward of the module: send encoded values if the group has a codec, and use
                secondary shards. Otherwise the values are exact.

        Raises:
            ShardedParameterError: a view of the sharded group was written to.
            OrderError: ranks would gather different groups; on all ranks.
        """
        if self.state is not State.SHARDED:
            return
        self.buffer_views.check_no_unsaved_writes()
        label = f"gather of {self.name}"
        self.buffer_views.grow()
        if encoded and (handle := self._start_for_module(label)) is not None:
            self._handle, self.state = handle, State.INFLIGHT
            return
        cuts = self.layout.cuts
        sends = self.fetch is None and self.axis.size > 1
        arrival = None
        if self.values.memory is None and not sends:
            self.expect_own()
        else:
            arrival = self.bring_own()
        if self.fetch is not None:
            self._handle = self.fetch.pull(self.channel, self.full, cuts, label)
        elif self.axis.size == 1:
            meet_before(self.axis, label)
        else:
            # On the stream of the shard's copy, so that the current stream does not wait for it.
            with contextlib.nullcontext() if arrival is None else arrival.stream():
                self._handle = self._all_gather(self.full, cuts, label)
        self._arrival = arrival
        self.state = State.INFLIGHT

    def _all_gather(self, full: torch.Tensor, cuts: tuple[int, ...], label: str) -> Handle:
        """Start a collective all-gather of the shards in `full`; raises OrderError as `start_all_gather`."""
        meet_before(self.axis, label)  # raises before anything is counted, so that ranks can go on
        tag = tag_of(self.channel, SPREAD, next(self._seq))
        if self.gather_order is not None:
            self.gather_order.before(self)
        return spread(self.axis, full, cuts, tag, label)

    @outside_transforms
    def wait_all_gather(self) -> None:
        """Wait for the all-gather, after `start_all_gather` if necessary, and make the parameters views of the buffer.

        Raises:
            ShardedParameterError: a view, or the storage, of a sharded parameter was changed.
        """
        if self.state is State.SHARDED:
            self.start_all_gather()
        if self.state is State.INFLIGHT:
            if self._handle is not None:
                self._handle.wait()
                self._handle = None
            arrival = self.bring_own() if self.owes_own else self._arrival
            self._arrival = None
            if arrival is not None:
                arrival.before_current()
            self.state = State.GATHERED
            replaced = []
            for member, view in zip(self.members, self.views, strict=True):
                param = member.param
                set_raw_class(param, ManagedParameter)
                if was_replaced(param, member):
                    replaced.append(member)
                set_raw_data(param, view)
                member.version, member.saved = param._version, False
            self.buffer_views.saved = 0
            self.buffer_views.snapshot()
            for member in replaced:
                reject_write("set_", member)

    def gather_together(self) -> None:
        """Gather with a collective, even if this rank has the values already. All ranks must call this."""
        fetch, self.fetch = self.fetch, None
        try:
            if self.state is not State.SHARDED:
                self._fill_again()
            else:
                self.wait_all_gather()
        finally:
            self.fetch = fetch

    def _fill_again(self) -> None:
        """All-gather the present shards into the full buffer of a gathered group."""
        label = f"gather of {self.name}"
        self.wait_all_gather()
        arrival = self.bring_own()
        if arrival is not None:
            arrival.before_current()
        if self.fetch is not None:
            self.fetch.pull(self.channel, self.full, self.layout.cuts, label).wait()
        else:
            self._all_gather(self.full, self.layout.cuts, label).wait()
        self.decoded = False
        self.buffer_views.snapshot()

    def retain(self) -> None:
        """Keep the memory of the full buffer allocated after resharding; no effect if parameters are offloaded."""
        if self.tiers.parameters is not RESIDENT:
            return
        self.buffer_views.grow()
        self.keep_unsharded_storage = True

    @outside_transforms
    def reshard(self, edits_allowed: bool = False) -> None:
        """Make the parameters sharded, and free the full buffer; no effect on groups that are never sharded.

        Args:
            edits_allowed: accept changes of parameters since the all-gather.

        Raises:
            ShardedParameterError: a parameter was changed, and `edits_allowed` is False.
        """
        if self.state is State.SHARDED or not self.policy.gathers_before_use:
            return
        self.wait_all_gather()
        for member, view in zip(self.members, self.views, strict=True):
            param = member.param
            version = param._version
            changed = version != member.version
            if not changed and param.data_ptr() != view.data_ptr():  # after `param.data = …`
                changed = param.dtype != view.dtype or not torch.equal(param.detach(), view)
            changed = changed or (member.snapshot is not None and self.buffer_views.written(member))
            if changed and not edits_allowed:
                param.data = view
                member.version, member.snapshot = version, None
                raise ShardedParameterError(
                    f"parameter '{member.name}' was changed in place while it was gathered, and the change would be "
                    f"lost. Wrap it in deepspeed.zero.GatheredParameters([param], modifier_rank=0)."
                )
            member.version = version
            member.saved = self.buffer_views.saves(member)
            set_raw_data(param, member.under(param))
            set_raw_class(param, ShardedParameter)
        self.state, self.decoded = State.SHARDED, False
        self.buffer_views.release_storage()

    @contextlib.contextmanager
    def whole(self, for_module: bool = False) -> Iterator[None]:
        """Return a context with the group gathered; at the end, reshard it if it was sharded and is not in use.

        Args:
            for_module: gather the values that forward and backward compute with; see `start_all_gather`.
        """
        was = self.state
        if for_module:
            self.start_all_gather(encoded=True)
        self.wait_all_gather()
        try:
            yield
        finally:
            if was is State.SHARDED and not self.users:
                self.reshard()

    def refresh(self) -> None:
        """Update a full buffer in use or viewed by other code to new shards; else reshard. All ranks must call this.

        Raises:
            ShardedParameterError: other code has a view, whose update needs a collective (`check_no_stale_views`).
        """
        if not self.policy.gathers_before_use:
            return
        if self.state is not State.SHARDED and self.users:
            self._fill_again()
            return
        self.reshard()
        self.buffer_views.forget_saved()
        if self.buffer_views.held():
            self.buffer_views.check_no_stale_views()
            self.wait_all_gather()
            self.reshard()

    def edited_members(self) -> list[ParamRecord]:
        """Return the parameters of an unsharded group that the user may have changed since the last step."""
        dtype, changed = self.dtype, []
        for member in self.members:
            param = member.param
            moved = param.data_ptr() != member.address
            if moved or param._version != member.version or member.exposed or param.dtype != dtype:
                changed.append(member)
        return changed

    # -- reading and writing --------------------------------------------------------------------------------------

    @property
    def reads_alone(self) -> bool:
        """Return whether this rank can read parameters without calls of the other ranks."""
        return self.fetch is not None or self.axis.size == 1

    def read(self, member: ParamRecord) -> torch.Tensor:
        """Return an unsharded copy of a parameter's values; collective unless `reads_alone`.

        Within a forward or backward, the values of a group with a codec are decoded ones, else exact ones.
        """
        self.buffer_views.check_no_unsaved_writes()
        running = self.lifecycle is not None and self.lifecycle.depth > 0
        exact = running or not self.decoded or not self.policy.gathers_before_use
        if self.state is State.GATHERED and exact:
            return self.views[member.index].clone()
        if self.fetch is not None and self.lifecycle is not None and running:
            self.lifecycle.used_outside(self)
            self.start_all_gather(encoded=True)
            self.wait_all_gather()
            copied = self.views[member.index].clone()
            self.reshard()
            return copied
        label = f"read of {member.name}"
        with self.values.borrowed() as values:
            if self.fetch is None:
                return self.assemble(member, values, READ, label).view(member.shape)
            # A one-sided read, for programs that save on one rank only.
            whole = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            whole[self.low : self.high] = values
        span = slice(member.offset, member.offset + member.numel)
        self.fetch.pull(self.channel, whole, self.layout.cuts, label, span).wait()
        return whole[span].clone().view(member.shape)

    def assemble(self, member: ParamRecord, of: torch.Tensor, kind: int, label: str) -> torch.Tensor:
        """All-gather one parameter's part of a sharded tensor. All ranks must call this.

        Args:
            member: parameter.
            of: 1-D tensor of the shard's size: values, master weights, gradients or optimizer state.
            kind: kind of message, for its tag.
            label: name of the collective for messages.

        Returns:
            1-D unsharded tensor of the parameter's size on the device, in the dtype of `of`.
        """
        dense = torch.empty(member.numel, dtype=of.dtype, device=self.device)
        cuts, rank = self.layout.cuts_of(member.index), self.axis.rank
        low = max(member.offset + cuts[rank] - self.layout.cuts[rank], 0)
        dense[cuts[rank] : cuts[rank + 1]] = of[low : low + cuts[rank + 1] - cuts[rank]]
        spread(self.axis, dense, cuts, tag_of(self.channel, kind, next(self._seq)), label).wait()
        return dense

    def keep_own(self) -> None:
        """Store this rank's part of the full buffer as its shard, after a change of gathered parameters.

        All ranks must call this.
        """
        meet_before_change([self])
        if self.policy.gathers_before_use:
            low, high = self.layout.cuts[self.axis.rank], self.layout.cuts[self.axis.rank + 1]
            with self.values.borrowed(changed=True, read=False) as values:
                values.copy_(self.full[low:high])
        for member in self.members:
            self.import_edits(member)
            member.version = member.param._version
        self.buffer_views.snapshot()
        self.advance()

    def advance(self) -> None:
        """Count a change of the shard, so that one-sided reads of other ranks get the new values."""
        self.changes += 1
        self._advance_copies()
        if self.fetch is not None:
            self.fetch.advance(self.channel)

    def start_all_gather_updated(self) -> Handle | None:
        """Start the all-gather after a step (stages 1 and 2); None if none is needed. All ranks must call this."""
        if not self.policy.all_gathers_after_step or self.axis.size == 1:
            return None
        tag, label = tag_of(self.channel, SPREAD, next(self._seq)), f"publish of {self.name}"
        if self.encoded is not None and self.master is not None:
            self.decoded = True
            return self.encoded.publish(self.full, tag, label)
        return spread(self.axis, self.full, self.layout.cuts, tag, label)

    def serve(self, any_graph: bool) -> None:
        """Use one-sided all-gathers from now on if possible: reads of other ranks' shards without their calls.

        Args:
            any_graph: use them also between ranks without shared memory, which may then gather in any order.
        """
        shared, memory = self.axis.shared, self.values.memory
        if shared is not None and memory is not None and self.tiers.parameters is RESIDENT:
            memory = self.axis.empty(memory.numel(), self.dtype, self.device).copy_(memory)
            self.values = Resident(self.values.label, memory)
        if shared is not None and memory is not None and shared.can_serve(self.channel, memory):
            self.fetch = SharedSlices(self.axis)
            self.fetch.serve(self.channel, memory)
        elif any_graph:
            self.fetch = service_of(self.axis)
            self.fetch.serve(self.channel, self.values.borrowed if memory is None else memory)
        if self.fetch is not None:  # other ranks may still read the shard when the group is garbage-collected
            channels = [self.channel, *self._serve_encoded()]
            self._dropped = weakref.finalize(self, self.axis.abandoned.extend, channels)
            self._dropped.atexit = False

    def attach(
        self, lifecycle: Gatherer, gather_order: GatherOrder | None, observer: Callable[[ShardGroup], None]
    ) -> None:
        """Connect the group to the hooks of an engine.

        Args:
            lifecycle: hooks that gather and reshard the group.
            gather_order: check of the order of all-gathers; None: no check.
            observer: called after each change of `state`.
        """
        self.lifecycle, self.gather_order, self._observer = lifecycle, gather_order, observer

    def dissolve(self) -> None:
        """Disconnect the group from its engine, and free the master weights.

        Gathered parameters become ordinary ones; sharded ones stay sharded, as after `zero.Init`.
        """
        self.wait()
        if self.state is State.INFLIGHT:
            self.wait_all_gather()
        if self.keep_unsharded_storage and self.state is State.SHARDED:
            self.keep_unsharded_storage = False
            self.buffer_views.release_storage()
        self.keep_unsharded_storage = False
        self._withdraw_copies()
        if self.fetch is not None:
            self.fetch.withdraw(self.channel)
            self.fetch = None
        self.secondary = None
        if self._dropped is not None:
            self._dropped.detach()
        self.lifecycle = self._observer = self.gather_order = None
        if self.master is not None:
            self.master.drop()
            self.master = None
        for member in self.members:
            if self.state is State.GATHERED:
                unmanage(member.param)
            member.reducer = member.owner = None

    def drop(self) -> None:
        """Free the buffers of a group whose parameters were moved to other groups."""
        self.full = torch.empty(0, dtype=self.dtype, device=self.device)
        self.values.drop()
        self.views = []
        self.buffer_views = BufferViews(self)


def group_of(member: ParamRecord) -> ShardGroup:
    """Return `member.group` with the static type `ShardGroup`."""
    return cast(ShardGroup, member.group)


def meet_before_change(groups: Sequence[ShardGroup]) -> None:
    """Wait until other ranks have finished one-sided reads, before shards change outside of `step`.

    All ranks must call this with the same groups.
    """
    for group in groups:
        group.wait()
        if group.state is State.INFLIGHT:
            group.wait_all_gather()
    first = {group.axis: group for group in reversed(groups) if group.fetch is not None}  # of each axis
    for served in sorted(first.values(), key=lambda group: group.axis.ranks):
        meet(served.axis, served.channel, next(served._seq), f"agreement before a change of {served.name}")
