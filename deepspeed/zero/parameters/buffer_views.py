"""Tracks views of a group's unsharded buffer, and the views that autograd saves.

[Note: buffer views] In plain PyTorch a view, a `detach()` or a `.data` of a parameter shows the parameter's values for
as long as it lives. So the buffer of a freed group is released only when no view is alive: a storage counts its
tensors, and the group knows how many are its own. While a view lives, the memory stays, and `ShardGroup.refresh` copies
new values into it when the shards change.

Autograd holds views too: `F.linear` on a matrix saves `weight.t()`. These must not keep memory from forward to
backward. They are found in the graph of a unit's outputs, and autograd then saves the position in the group instead;
backward creates the view again. A saved view that is not found there counts as held: this costs memory, but values stay
correct.

The same holds for a parameter that autograd saves itself, as the object: torch counts its references besides Python's.
In the graph of a unit's outputs it becomes a position; for functions written in Python, which get the object, the group
is gathered. Elsewhere (another module has read it, or a unit's forward has stored something) backward gathers nothing:
the freed parameter then stays in the full buffer, whose memory stays (`ParamRecord.saved`).

A backward with `create_graph` saves again what it unpacks, in nodes that no hook of a unit surrounds. It therefore
unpacks a view that shares the version counter of the parameter, not of the memory, which gathers refill with the same
values. A parameter that autograd saved itself has no values while it is freed; such a backward unpacks a view instead.
These views are held: the memory stays until their graph is freed.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed.errors import ShardedParameterError
from deepspeed.foundation.malloc import huge_pages, own_pages
from deepspeed.foundation.saved_tensors import nodes_since, saved_by
from deepspeed.zero.parameters.functorch import in_transform
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import (
    ParameterGroup,
    ParamRecord,
    ZeroParamStatus,
    memories,
    references,
    references_to,
)


class LentGroup(ParameterGroup, Protocol):
    """Interface of a group for `BufferViews`."""

    users: int
    editors: int
    keep_unsharded_storage: bool
    own_pages: bool

    @property
    def buffer_views(self) -> BufferViews: ...

    @property
    def fetch(self) -> object | None: ...

    def whole(self) -> AbstractContextManager[None]: ...

    def new_buffer(self) -> None: ...

    def wait_all_gather(self) -> None: ...


class BufferViews:
    """Memory of a group's unsharded buffer, and the foreign tensors over it."""

    def __init__(self, group: LentGroup) -> None:
        self._group, self._storage = group, group.full.untyped_storage()
        self.key = self._storage._cdata  # equal for all tensors over it
        memories.add(self.key)
        weakref.finalize(self, memories.discard, self.key).atexit = False
        self._bytes = self._storage.nbytes()
        self._own = len(group.views) + 2  # tensors of the freed group: views, the full buffer; and `self._storage`
        self.lent = False  # somebody held a view when the group was freed
        self.saved = 0  # parameters of the freed group that lie in it, since autograd has saved them
        self.functions: list[weakref.ref[Any]] = []  # written in Python, in graphs of units, that have saved parameters
        self._quiet: int | None = None  # fewest tensors over the memory that were ever seen

    @property
    def _gathered(self) -> bool:
        return self._group.status is ZeroParamStatus.AVAILABLE

    def others(self) -> int:
        """Count tensors over the memory besides the freed group's own: gathered parameters, and users' views."""
        return references(self.key) - self._own - self.saved

    def saves(self, member: ParamRecord) -> bool:
        """Return whether autograd saved the gathered parameter itself, without a place or prehook for its values."""
        param = member.param
        count = references_to(param) - 1  # Python's
        if count == 1 and param.requires_grad and not (member.accumulates and torch._C._current_graph_task_id() != -1):
            with torch.enable_grad():  # is that what is saved, or the node that accumulates its gradient?
                node = param.view_as(param).grad_fn  # keeps the latter
            count = references_to(param) - 1
            member.accumulates = count == 1  # backward frees it in the same graph, and need not ask again
            del node
        count -= param.requires_grad
        if count > 0 and self.functions:
            count -= sum(saved.data is param for saved in self._saved_by_functions())
        return count > 0

    def _saved_by_functions(self) -> Iterator[Any]:
        alive = [(reference, node) for reference in self.functions if (node := reference()) is not None]
        self.functions = [reference for reference, _ in alive]
        for _, node in alive:
            yield from (saved for _, saved in saved_by(node) if saved.unpack_hook is None)

    def gather_for(self, node: Any) -> None:
        """Gather the group when the backward of a Python autograd function runs, by whatever path."""
        if not any(reference() is node for reference in self.functions):
            group = self._group
            self.functions.append(weakref.ref(node))
            node.register_prehook(lambda _grads: group.wait_all_gather())

    def may_be_saved(self) -> bool:
        """Return whether autograd may have saved a gathered parameter itself."""
        return any(references_to(member.param) > 1 + member.param.requires_grad for member in self._group.members)

    def forget_saved(self) -> None:
        """Reset `saved` of all members: torch raises in backward through parameters saved before the change."""
        if not self.saved:
            return
        for member in self._group.members:
            if member.saved:
                member.saved = False
                member.lay_where_it_rests()
        self.saved = 0
        self._give_back()

    def track_writes(self) -> bool:
        """Return whether foreign tensors share the memory, so that writes must be tracked."""
        now = self.others()
        self._quiet = now if self._quiet is None else min(self._quiet, now)
        return now > self._quiet

    def outlived(self) -> bool:
        """Return whether a tensor of other code uses the unsharded buffer.

        Parameters whose storage `param.data = …` has replaced no longer count as users of the buffer.
        """
        away = sum(member.param.untyped_storage()._cdata != self.key for member in self._group.members)
        return self._quiet is not None and self.others() > self._quiet - away

    def held(self) -> bool:
        """Return whether other code holds a view of the freed group."""
        return self.lent and self.others() > 0

    def grow(self) -> None:
        """Allocate the memory; new memory is uninitialized."""
        if self._storage.nbytes() != self._bytes:
            with own_pages() if self._group.own_pages else nullcontext():
                self._storage.resize_(self._bytes)
            if self._group.own_pages:
                huge_pages(self._storage.data_ptr(), self._bytes)

    def release_storage(self) -> None:
        """Release the unsharded buffer, unless the policy, a view of other code, or autograd keeps it.

        If other code has a view, the values are copied, to detect later writes.
        """
        self.saved = sum(member.saved for member in self._group.members)
        self.lent = self.others() > 0
        for member in self._group.members:
            member.snapshot = member.flat().clone() if self.lent else None
        self._give_back()

    def _give_back(self) -> None:
        if self.lent or self.saved or self._group.keep_unsharded_storage:
            return
        if not self._storage.resizable():  # `numpy()` fixes the size for ever, also after the array is gone
            self._leave()
        else:
            self.shrink()

    def shrink(self) -> None:
        """Free the memory; no other code may hold it."""
        self._storage.resize_(0)

    # -- writes that would be lost ----------------------------------------------------------------------------------

    def mark_data_exposed(self, member: ParamRecord) -> None:
        """Copy the values for a later comparison, since writes through `param.data` are not counted."""
        group, member.exposed = self._group, True
        self.track_writes()
        if group.policy.gathers_before_use and self._gathered and not group.editors and member.snapshot is None:
            member.snapshot = member.flat().clone()

    def snapshot(self, members: list[ParamRecord] | None = None) -> None:
        """Copy the new values of the buffer for a later comparison."""
        for member in members or self._group.members:
            if member.snapshot is not None:
                member.snapshot = member.flat().clone()

    def written(self, member: ParamRecord) -> bool:
        """Return whether a write through `param.data` has changed the values."""
        return member.snapshot is not None and not same_bits(member.flat(), member.snapshot)

    def check_no_unsaved_writes(self) -> None:
        """Raise if a view of the freed group was written to. The view keeps the memory."""
        if not self.lent or self._gathered:
            return
        written = [m for m in self._group.members if m.current_version != m.version or self.written(m)]
        if not written:
            return
        for member in written:
            member.version, member.snapshot = member.current_version, None
        self._leave()
        names = ", ".join(f"'{member.name}'" for member in written)
        raise ShardedParameterError(
            f"a view of parameter {names}, taken while it was gathered, was changed after it was freed, and the change "
            f"would be lost. Change the parameter in deepspeed.zero.GatheredParameters([param], modifier_rank=0)."
        )

    def _leave(self) -> None:
        """Leave this memory to the holders of views, and allocate new memory."""
        group, before, saved = self._group, self._group.full, self.saved
        group.new_buffer()
        if saved:
            group.full.copy_(before)
            group.buffer_views.saved = saved
            for member in group.members:
                member.lay_where_it_rests()
        elif not group.keep_unsharded_storage:
            group.buffer_views.shrink()

    def check_no_stale_views(self) -> None:
        """Raise if views are held on this rank and only a collective of all ranks could update their values."""
        group = self._group
        if not self.lent or group.fetch is not None or group.axis.size == 1 or not self.held():
            return
        if any(member.param.requires_grad for member in group.members):
            raise ShardedParameterError(
                f"there is a view of a parameter of '{group.name}', taken while it was gathered, and its values "
                f"change now: hold a clone() instead. (Views follow their parameter where gathers are one-sided; "
                f"zero_optimization.stage3_fixed_graph makes them collectives.)"
            )


@dataclass(frozen=True)
class _Place:
    """A view that autograd saved, as a position in the full buffer."""

    group: LentGroup
    member: ParamRecord
    version: int | None  # of the parameter; None for a view that does not count with it
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> torch.Tensor:
        """Return a view of the full buffer with the current values, or a copy if the group must be gathered for it."""
        group = self.group
        if self.version is not None and self.version != self.member.current_version:
            raise ShardedParameterError(
                f"backward needs parameter '{self.member.name}' as it was in forward, and it has been changed since "
                f"(by a step or in place); run backward before, or the forward again"
            )
        with group.whole():
            view = torch.as_strided(self._source(), self.size, self.stride, self.offset)
            return view if group.users else view.clone()

    def keep(self, saved: Any) -> None:
        """Make autograd store the position instead of its saved tensor."""
        saved.register_hooks(lambda _view: self, _Place.view)

    @staticmethod
    def keep_view(saved: Any, view: Any, groups: dict[int, LentGroup]) -> None:
        """Make autograd store a position instead of a view of one of these groups, which are keyed by their memory."""
        if not (type(view) is torch.Tensor or is_managed(view)) or view.layout != torch.strided or in_transform(view):
            return
        group = groups.get(view.untyped_storage()._cdata)
        if group is None or view.dtype != group.dtype or view.is_conj() or view.is_neg():
            return
        offset = int(view.storage_offset())
        member = group.members[bisect_right(group.offsets, offset - int(group.full.storage_offset())) - 1]
        counts = view._version == member.param._version
        place = _Place(group, member, view._version if counts else None, view.size(), view.stride(), offset)
        del view
        place.keep(saved)

    def _source(self) -> torch.Tensor:
        """Return the full buffer as a tensor whose version does not change with the next gather."""
        param = self.member.param
        if self.version is not None and param.untyped_storage()._cdata == self.group.buffer_views.key:
            return param.detach()  # a backward through what is made of it now is refused after a step
        return self.group.full.data


def keep_places(outputs: Iterable[torch.Tensor], since: int, groups: Sequence[LentGroup]) -> None:
    """Make autograd save positions in these gathered groups, instead of parameters and views of them."""
    by_memory = {group.buffer_views.key: group for group in groups}
    for node in nodes_since([tensor.grad_fn for tensor in outputs], since):
        for _, saved in saved_by(node):
            if saved.unpack_hook is not None:  # somebody's hooks keep it already
                continue
            view = saved.data
            if is_managed(view) and isinstance(node, torch.autograd.function.BackwardCFunction):
                group = by_memory.get(view.untyped_storage()._cdata)  # its backward may want attributes of the object
                if group is not None:
                    group.buffer_views.gather_for(node)
            else:
                _Place.keep_view(saved, view, by_memory)


def keep_parameters(node: Any, since: int) -> None:
    """Make autograd save positions instead of parameters, before a backward through `node` with `create_graph`."""
    for user in nodes_since([node], since):
        for name, saved in saved_by(user):
            param: Any = None if saved.unpack_hook is not None else saved.data
            if is_managed(param) and param._ds_member.group.policy.gathers_before_use:
                getattr(user, name)  # unpacks it as torch does, which looks at its version
                member, group = param._ds_member, param._ds_member.group
                start = int(group.full.storage_offset()) + member.offset
                _Place(group, member, member.current_version, member.shape, member.strides, start).keep(saved)


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of one dtype have the same bits; NaN equals itself."""
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
