"""Parameters that travel together: one flat buffer, cut into slices; shard, gather, free and publish.

[Note: one storage] The full buffer of a group is one storage for the life of the group. Freeing shrinks it to nothing,
gathering grows it back and refills it, so views that autograd saved in forward are valid again in backward.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import READ, SPREAD, Handle, spread, tag_of
from deepspeed.comm.fetch import FetchService
from deepspeed.errors import ShardedParameterError, UsageError
from deepspeed.storage.resident import ResidentTier
from deepspeed.storage.tier import Tier
from deepspeed.zero.layout import Layout
from deepspeed.zero.param import ManagedParameter, ShardedParameter, ZeroParamStatus, manage, unmanage
from deepspeed.zero.policy import Policy

if TYPE_CHECKING:
    from deepspeed.zero.lifecycle import Lifecycle
    from deepspeed.zero.optimizer import ZeroOptimizer
    from deepspeed.zero.reducer import Reducer

_uids = itertools.count()


class State(enum.Enum):
    """Where the full buffer of a group is."""

    SHARDED = "sharded"
    INFLIGHT = "in flight"
    GATHERED = "gathered"


_STATUS = {
    State.SHARDED: ZeroParamStatus.NOT_AVAILABLE,
    State.INFLIGHT: ZeroParamStatus.INFLIGHT,
    State.GATHERED: ZeroParamStatus.AVAILABLE,
}


@dataclass(eq=False)
class Member:
    """One parameter of a group.

    Args:
        param: the parameter; its identity never changes.
        name: qualified name in the module, for reports.
        index: position in the group.
        place: position in the model.
    """

    param: Parameter
    name: str
    index: int = 0
    place: int = 0
    shape: torch.Size = field(init=False)
    uid: int = field(default_factory=lambda: next(_uids))
    group: ShardGroup = field(init=False, repr=False)
    placeholder: torch.Tensor = field(init=False, repr=False)
    reducer: Reducer | None = field(default=None, repr=False)
    owner: ZeroOptimizer | None = field(default=None, repr=False)  # the optimizer that updates it
    active_modules: set[Any] = field(default_factory=set, repr=False)
    version: int = 0  # the parameter's version counter when it was last known to agree with its slice
    exposed: bool = False  # `param.data` was handed out, and writes through it are not counted

    def __post_init__(self) -> None:
        self.shape = self.param.shape

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    @property
    def offset(self) -> int:
        """Where it begins in the group."""
        return self.group.offsets[self.index]

    def rest(self) -> None:
        """Make what stands for the values while they are away: true shape, no memory, every element NaN."""
        dtype = self.group.dtype
        value = float("nan") if dtype.is_floating_point else 0
        self.placeholder = torch.full((), value, dtype=dtype, device=self.group.device).expand(self.shape)

    def own_piece(self) -> torch.Tensor:
        """This rank's part of the values: a 1-D view of the slice, possibly empty."""
        group, cuts = self.group, self.group.layout.cuts_of(self.index)
        rank = group.axis.rank
        low = self.offset + cuts[rank] - group.layout.cuts[rank]
        return group.slice[max(low, 0) : max(low, 0) + cuts[rank + 1] - cuts[rank]]

    def rejoin(self) -> None:
        """Take back values that were put under the gathered parameter by `param.data = …`.

        Raises:
            UsageError: they have another shape or dtype, as after `module.half()`.
        """
        view, param = self.group.views[self.index], self.param
        if param.data_ptr() == view.data_ptr() and param.dtype == view.dtype:
            return
        if param.shape != view.shape or param.dtype != view.dtype:
            raise UsageError(
                f"parameter '{self.name}' was {tuple(view.shape)} {view.dtype} at initialize and is now "
                f"{tuple(param.shape)} {param.dtype}: cast or resize the model before initialize, or name the dtype "
                f"in the JSON (bf16, fp16)"
            )
        view.copy_(param.detach())
        param.data = view
        self.version = -1

    def dense(self) -> torch.Tensor:
        """A private dense copy; all ranks of the axis call together unless the values are here."""
        return self.group.read(self)


class ShardGroup:
    """A group of parameters under one policy.

    Args:
        axis: the ranks that share the state.
        policy: what is split.
        layout: how the concatenation is cut.
        members: the parameters, in the order of the layout, with their values in `param.data`.
        dtype: compute dtype; None: that of the parameters.
        master: dtype of a master copy of what the optimizer updates here; None, or the compute dtype: none is needed,
            the values are the master.
        tier: where slice and master rest.
    """

    def __init__(
        self,
        axis: Axis,
        policy: Policy,
        layout: Layout,
        members: list[Member],
        *,
        dtype: torch.dtype | None = None,
        master: torch.dtype | None = None,
        tier: Tier | None = None,
    ) -> None:
        first = members[0].param
        self.axis, self.policy, self.layout, self.members = axis, policy, layout, members
        self.offsets = layout.offsets  # computed once; the layout derives it anew at each call
        self.dtype, self.device = dtype or first.dtype, first.device
        self.tier = tier or ResidentTier()
        self.channel = axis.channel()
        self.name = members[0].name + (f" … {members[-1].name}" if len(members) > 1 else "")
        self.users = 0  # modules and contexts that need the values right now
        self.retains = False  # freeing keeps the memory of the full buffer
        self.fetch: FetchService | None = None
        self.lifecycle: Lifecycle | None = None  # of the engine that gathers it
        self._handle: Handle | None = None
        self._seq = itertools.count()
        for index, member in enumerate(members):
            member.group, member.index = self, index
            member.rest()
        self.full = torch.zeros(layout.padded, dtype=self.dtype, device=self.device)
        # The parameters' places in the full buffer, in their shapes; valid whenever the storage has its size.
        ends = zip(members, self.offsets, strict=True)
        self.views = [self.full[offset : offset + m.numel].view(m.shape) for m, offset in ends]
        self._bytes = self.full.untyped_storage().nbytes()
        self.state = State.GATHERED
        low, high = layout.cuts[axis.rank], layout.cuts[axis.rank + 1]
        # What the optimizer updates here.
        self.low, self.high = (low, high) if policy.owns_a_slice else (0, layout.padded)
        self.slice = self.full[low:high]
        own_master = master is not None and master != self.dtype
        self.master = self.tier.allocate(self.high - self.low, master, self.device) if own_master and master else None
        self._adopt()
        if policy.gathers_before_use:
            self.slice = self.tier.allocate(high - low, self.dtype, self.device)
            self.slice.copy_(self.full[low:high])
            self.free()

    @property
    def numel(self) -> int:
        """Elements of the full buffer."""
        return self.layout.padded

    @property
    def status(self) -> ZeroParamStatus:
        """The public name of the state."""
        return _STATUS[self.state]

    def _adopt(self) -> None:
        """Copy the values into the full buffer and make the parameters views of it."""
        for member, offset in zip(self.members, self.offsets, strict=True):
            values = member.param.data.reshape(-1)
            self.full[offset : offset + member.numel].copy_(values)
            self.overwrite_master(member, values)
        for member, view in zip(self.members, self.views, strict=True):
            member.param.data = view
            manage(member.param, member)
            member.version = member.param._version

    def overwrite_master(self, member: Member, values: torch.Tensor) -> None:
        """Take one member's values, dense and flat, into the master copy, if there is one."""
        if self.master is None:
            return
        for piece in self.layout.pieces_within(self.low, self.high):
            if piece.index == member.index:
                at = piece.at - self.low
                self.master[at : at + piece.numel].copy_(values[piece.start : piece.stop])

    def import_edits(self, member: Member) -> None:
        """Take those values of a whole member into the master copy that are not its rounded master already."""
        if self.master is None:
            return
        for piece in self.layout.pieces_within(self.low, self.high):
            if piece.index == member.index:
                master = self.master[piece.at - self.low :][: piece.numel]
                values = self.full[member.offset + piece.start : member.offset + piece.stop]
                torch.where(master.to(self.dtype) == values, master, values.to(master.dtype), out=master)

    def add_master(self, dtype: torch.dtype) -> None:
        """Give a group that was frozen its master copy, from the values it has."""
        if self.master is None and dtype != self.dtype:
            self.master = self.tier.allocate(self.high - self.low, dtype, self.device)
            self.master.copy_(self.slice if self.policy.owns_a_slice else self.full)

    def masters(self) -> torch.Tensor:
        """What the optimizer updates: the master copy, or the values themselves when they are their own master."""
        if self.master is not None:
            return self.master
        return self.slice if self.policy.owns_a_slice else self.full

    def round_masters(self) -> None:
        """Cast updated masters into the compute dtype."""
        if self.master is not None:
            (self.slice if self.policy.owns_a_slice else self.full).copy_(self.master)

    def write(self, member: Member, values: torch.Tensor) -> None:
        """Replace one member's values on this rank: slice, master, and the full buffer if it is here.

        Args:
            member: the parameter.
            values: dense, any shape of the right number of elements, the same on all ranks.
        """
        flat = values.detach().reshape(-1)
        if self.state is State.INFLIGHT:
            self.finish_gather()
        self.overwrite_master(member, flat)
        if self.state is State.GATHERED:
            self.full[member.offset : member.offset + member.numel].copy_(flat)
        if self.policy.gathers_before_use:
            cuts, rank = self.layout.cuts_of(member.index), self.axis.rank
            member.own_piece().copy_(flat[cuts[rank] : cuts[rank + 1]])

    # -- gather and free ------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to gather; nothing to do unless the group is sharded."""
        if self.state is not State.SHARDED:
            return
        label = f"gather of {self.name}"
        if not self.retains:
            self.full.untyped_storage().resize_(self._bytes)
        rank, cuts = self.axis.rank, self.layout.cuts
        self.full[cuts[rank] : cuts[rank + 1]].copy_(self.slice)
        if self.fetch is not None:
            self._handle = self.fetch.pull(self.channel, self.full, cuts, label)
        else:
            tag = tag_of(self.channel, SPREAD, next(self._seq))
            self._handle = spread(self.axis, self.full, cuts, tag, label)
        self.state = State.INFLIGHT

    def finish_gather(self) -> None:
        """Wait for the values and put them under the parameters."""
        if self.state is State.SHARDED:
            self.start_gather()
        if self.state is State.INFLIGHT:
            if self._handle is not None:
                self._handle.wait()
                self._handle = None
            self.state = State.GATHERED
            for member, view in zip(self.members, self.views, strict=True):
                param = member.param
                param.__class__ = ManagedParameter
                param.data = view
                member.version = param._version

    def gather_together(self) -> None:
        """Gather as a collective that every rank of the axis joins, whatever each rank has already."""
        mine, self.fetch = self.fetch, None
        try:
            if self.state is not State.SHARDED:
                self.finish_gather()
                rank, cuts = self.axis.rank, self.layout.cuts
                self.full[cuts[rank] : cuts[rank + 1]].copy_(self.slice)
                tag = tag_of(self.channel, SPREAD, next(self._seq))
                spread(self.axis, self.full, cuts, tag, f"gather of {self.name}").wait()
            else:
                self.finish_gather()
        finally:
            self.fetch = mine

    def retain(self) -> None:
        """Keep the memory of the full buffer from now on; freed values are out of reach all the same.

        Growing a buffer anew costs a page fault per page, more than the gather itself on small models.
        """
        self.full.untyped_storage().resize_(self._bytes)
        self.retains = True

    def free(self, edits_allowed: bool = False) -> None:
        """Give the memory of the full buffer back.

        Args:
            edits_allowed: in-place changes of the parameters have been taken care of.

        Raises:
            ShardedParameterError: when a parameter was changed in place while gathered: the change would be lost.
        """
        if self.state is State.SHARDED or not self.policy.gathers_before_use:
            return
        self.finish_gather()
        for member in self.members:
            param = member.param
            if param._version != member.version and not edits_allowed:
                member.version = param._version
                raise ShardedParameterError(
                    f"parameter '{member.name}' was changed in place while it was gathered, and the change would be "
                    f"lost. Wrap it in deepspeed.zero.GatheredParameters([param], modifier_rank=0)."
                )
            param.data = member.placeholder
            param.__class__ = ShardedParameter
        self.state = State.SHARDED
        if not self.retains:
            self.full.untyped_storage().resize_(0)

    # -- reading and writing --------------------------------------------------------------------------------------

    def read(self, member: Member) -> torch.Tensor:
        """A private dense copy of one member."""
        if self.state is State.GATHERED:
            return self.views[member.index].clone()
        if self.fetch is not None and self.lifecycle is not None and self.lifecycle.depth:
            self.lifecycle.used_outside(self)
            self.finish_gather()
            copied = self.views[member.index].clone()
            self.free()
            return copied
        return self.assemble(member, self.slice, READ, f"read of {member.name}").view(member.shape)

    def assemble(self, member: Member, of: torch.Tensor, kind: int, label: str) -> torch.Tensor:
        """All pieces of one member, as every rank holds them in `of`.

        Args:
            member: the parameter.
            of: 1-D over this rank's slice: values, master, gradients or optimizer state.
            kind: kind of message.
            label: for reports.

        Returns:
            1-D dense tensor of the member, dtype of `of`; all ranks call together.
        """
        dense = torch.empty(member.numel, dtype=of.dtype, device=of.device)
        cuts, rank = self.layout.cuts_of(member.index), self.axis.rank
        low = max(member.offset + cuts[rank] - self.layout.cuts[rank], 0)
        dense[cuts[rank] : cuts[rank + 1]] = of[low : low + cuts[rank + 1] - cuts[rank]]
        spread(self.axis, dense, cuts, tag_of(self.channel, kind, next(self._seq)), label).wait()
        return dense

    def keep_own(self) -> None:
        """Take this rank's part of the full buffer as the new slice (after an edit of gathered parameters)."""
        if self.policy.gathers_before_use:
            low, high = self.layout.cuts[self.axis.rank], self.layout.cuts[self.axis.rank + 1]
            self.slice.copy_(self.full[low:high])
        for member in self.members:
            if member.param._version != member.version:
                self.overwrite_master(member, self.full[member.offset : member.offset + member.numel])
            member.version = member.param._version
        self.advance()

    def advance(self) -> None:
        """The slice has new values: ranks that ask for this version are served now."""
        if self.fetch is not None:
            self.fetch.advance(self.channel)

    def start_publish(self) -> Handle | None:
        """Send the updated slice to the other ranks; None when nothing travels."""
        if not self.policy.publishes_after_step:
            return None
        tag = tag_of(self.channel, SPREAD, next(self._seq))
        return spread(self.axis, self.full, self.layout.cuts, tag, f"publish of {self.name}")

    def serve(self, fetch: FetchService) -> None:
        """Gather one-sidedly from now on."""
        self.fetch = fetch
        fetch.serve(self.channel, self.slice)

    def register_user(self, module: Any) -> None:
        """`module` uses this group although its parameters are not below it."""
        if self.lifecycle is not None:
            self.lifecycle.add_external(module, self)

    def unregister_user(self, module: Any) -> None:
        """Undo `register_user`."""
        if self.lifecycle is not None:
            self.lifecycle.remove_external(module, self)

    def dissolve(self) -> None:
        """Leave the engine: parameters that are whole become plain ones, sharded ones stay as zero.Init makes them."""
        if self.state is State.INFLIGHT:
            self.finish_gather()
        if self.retains and self.state is State.SHARDED:
            self.full.untyped_storage().resize_(0)
        self.retains = False
        if self.fetch is not None:
            self.fetch.withdraw(self.channel)
            self.fetch = None
        self.lifecycle = self.master = None
        for member in self.members:
            if self.state is State.GATHERED:
                unmanage(member.param)
            member.reducer = member.owner = None

    def drop(self) -> None:
        """Let the buffers go: the parameters have been laid elsewhere."""
        self.full = self.slice = torch.empty(0, dtype=self.dtype, device=self.device)
        self.views = []
