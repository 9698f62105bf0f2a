"""Views of a parameter group's full buffer that belong to users or to autograd.

[Note: buffer views] In PyTorch, a view, a `detach()` or a `.data` of a parameter shows the parameter's values as long
as it exists. The full buffer of a resharded group is therefore freed only if no such view exists: torch counts the
tensors of a storage, and the group knows how many of them are its own. Otherwise the memory stays allocated, and
`ShardGroup.refresh` copies new values into it when the shards change.

Autograd saves views too: `F.linear` saves `weight.t()`. These must not keep memory allocated from forward to backward.
They are searched for in the autograd graph of a unit's outputs (a unit is a module that is gathered as a whole) and
replaced by their position in the group, from which backward creates the view again. A saved view that is not found
keeps the memory allocated, and its values stay correct.

Autograd also saves parameters themselves, which a reference count shows. In the graph of a unit's outputs they are
replaced by their position too. Autograd functions written in Python need the parameter object: before their backward,
the group is gathered. A parameter that was saved in another graph (for example read by another module) stays a view of
the full buffer after resharding, and the memory stays allocated (`ParamRecord.saved`).

A backward with `create_graph=True` saves its unpacked tensors again, where no hook replaces them. It therefore unpacks
views with the parameter's version counter instead of the buffer's, which changes with each all-gather. These views
keep the memory allocated until their graph is freed.
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
    """Attributes of a parameter group that `BufferViews` uses; see `ShardGroup`."""

    users: int
    editors: int
    keep_unsharded_storage: bool
    own_pages: bool

    @property
    def buffer_views(self) -> BufferViews: ...

    @property
    def fetch(self) -> object | None: ...

    def whole(self, for_module: bool = False) -> AbstractContextManager[None]: ...

    def new_buffer(self) -> None: ...

    def gather_for_module(self) -> None: ...


class BufferViews:
    """Memory of a group's full buffer, and detection of tensors of other code that share it.

    Args:
        group: parameter group whose full buffer and views were just allocated.
    """

    def __init__(self, group: LentGroup) -> None:
        self._group, self._storage = group, group.full.untyped_storage()
        self.key = self._storage._cdata  # identity of the storage, equal for all its tensors
        memories.add(self.key)
        weakref.finalize(self, memories.discard, self.key).atexit = False
        self._bytes = self._storage.nbytes()
        self._own = len(group.views) + 2  # references of the resharded group: views, full buffer, `self._storage`
        self.lent = False  # other code had a view when the group was resharded
        self.saved = 0  # number of parameters that are views of the buffer after resharding (`ParamRecord.saved`)
        self.functions: list[weakref.ref[Any]] = []  # Python autograd functions that have saved parameters
        self._quiet: int | None = None  # minimum of `others` that was observed

    @property
    def _gathered(self) -> bool:
        return self._group.status is ZeroParamStatus.AVAILABLE

    def others(self) -> int:
        """Return the number of tensors on the memory that are not the group's: gathered parameters and users' views."""
        return references(self.key) - self._own - self.saved

    def saves(self, member: ParamRecord) -> bool:
        """Return whether autograd has saved a gathered parameter itself in a way that needs its values to stay."""
        param = member.param
        count = references_to(param) - 1  # without the reference of Python
        if count == 0:
            return False
        if count == 1 and param.requires_grad and not (member.accumulates and torch._C._current_graph_task_id() != -1):
            with torch.enable_grad():  # the reference may be that of the node that accumulates the gradient
                node = param.view_as(param).grad_fn  # keeps this node alive
            count = references_to(param) - 1
            member.accumulates = count == 1  # need not be tested again in the backward of the same graph
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
        """Register a hook that gathers the group before the backward of a Python autograd function."""
        if not any(reference() is node for reference in self.functions):
            group = self._group
            self.functions.append(weakref.ref(node))
            node.register_prehook(lambda _grads: group.gather_for_module())

    def may_be_saved(self) -> bool:
        """Return whether autograd may have saved a parameter object of the gathered group, not just a view of it.

        A cheap test of reference counts: False is certain, True is not.
        """
        return any(references_to(member.param) > 1 + member.param.requires_grad for member in self._group.members)

    def forget_saved(self) -> None:
        """Free memory that was kept for parameters saved by autograd, after they have changed.

        A backward that needs the old values raises in torch.
        """
        if not self.saved:
            return
        for member in self._group.members:
            if member.saved:
                member.saved = False
                member.lay_where_it_rests()
        self.saved = 0
        self._give_back()

    def track_writes(self) -> bool:
        """Return whether more tensors share the memory than the minimum so far, so that writes must be detected."""
        now = self.others()
        self._quiet = now if self._quiet is None else min(self._quiet, now)
        return now > self._quiet

    def outlived(self) -> bool:
        """Return whether tensors of other code share the memory of a group that is never resharded.

        Parameters with another storage, after `param.data = …`, are not expected to share it.
        """
        away = sum(member.param.untyped_storage()._cdata != self.key for member in self._group.members)
        return self._quiet is not None and self.others() > self._quiet - away

    def held(self) -> bool:
        """Return whether other code has a view of the resharded group."""
        return self.lent and self.others() > 0

    def grow(self) -> None:
        """Allocate the memory, uninitialized, if it was freed."""
        if self._storage.nbytes() != self._bytes:
            with own_pages() if self._group.own_pages else nullcontext():
                self._storage.resize_(self._bytes)
            if self._group.own_pages:
                huge_pages(self._storage.data_ptr(), self._bytes)

    def release_storage(self) -> None:
        """Free the full buffer, unless a view of other code, autograd, or `keep_unsharded_storage` needs it.

        If other code has a view, the values are copied, so that later writes can be detected.
        """
        self.saved = sum(member.saved for member in self._group.members)
        self.lent = self.others() > 0
        for member in self._group.members:
            member.snapshot = member.flat().clone() if self.lent else None
        self._give_back()

    def _give_back(self) -> None:
        if self.lent or self.saved or self._group.keep_unsharded_storage:
            return
        if not self._storage.resizable():  # a storage is never resizable again after `numpy()`
            self._leave()
        else:
            self.shrink()

    def shrink(self) -> None:
        """Free the memory; the caller must know that no other code has a view of it."""
        self._storage.resize_(0)

    # -- writes that would be lost ----------------------------------------------------------------------------------

    def mark_data_exposed(self, member: ParamRecord) -> None:
        """Record a read of `param.data`; at stage 3, copy gathered values, since writes change no version counter."""
        group, member.exposed = self._group, True
        self.track_writes()
        if group.policy.gathers_before_use and self._gathered and not group.editors and member.snapshot is None:
            member.snapshot = member.flat().clone()

    def snapshot(self, members: list[ParamRecord] | None = None) -> None:
        """Update the snapshots of parameters that have one, after new values were written to the buffer.

        Args:
            members: parameters with new values; None: all.
        """
        for member in members or self._group.members:
            if member.snapshot is not None:
                member.snapshot = member.flat().clone()

    def written(self, member: ParamRecord) -> bool:
        """Return whether a parameter differs from its `snapshot`, because of a write; False without a snapshot."""
        return member.snapshot is not None and not same_bits(member.flat(), member.snapshot)

    def check_no_unsaved_writes(self) -> None:
        """Check that no view of the resharded group was written to.

        Raises:
            ShardedParameterError: a view was written to. It keeps its memory, and the group gets new memory.
        """
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
        """Allocate new memory for the group; the present memory stays with the views of other code."""
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
        """Check that no view of other code needs a collective to get new values.

        Raises:
            ShardedParameterError: a group with trained parameters has such a view, and no one-sided all-gather.
        """
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
    """Position in the full buffer of a tensor that autograd has saved; see [Note: buffer views]."""

    group: LentGroup
    member: ParamRecord
    version: int | None  # version counter of the parameter; None: the view does not share it
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> torch.Tensor:
        """Return the saved tensor: a view of the full buffer, or a copy if the group is gathered only for this call.

        Raises:
            ShardedParameterError: the parameter has changed since forward.
        """
        group = self.group
        if self.version is not None and self.version != self.member.current_version:
            raise ShardedParameterError(
                f"backward needs parameter '{self.member.name}' as it was in forward, and it has been changed since "
                f"(by a step or in place); run backward before, or the forward again"
            )
        with group.whole(for_module=True):
            view = torch.as_strided(self._source(), self.size, self.stride, self.offset)
            return view if group.users else view.clone()

    def keep(self, saved: Any) -> None:
        """Register hooks on a saved tensor of autograd, so that autograd stores this position instead."""
        saved.register_hooks(lambda _view: self, _Place.view)

    @staticmethod
    def keep_view(saved: Any, view: Any, groups: dict[int, LentGroup]) -> None:
        """Make autograd store a position instead of a saved tensor, if that is a view of a group's full buffer.

        Args:
            saved: saved tensor of autograd.
            view: its value.
            groups: gathered groups by `BufferViews.key`.
        """
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
        """Return a tensor on the full buffer whose version counter does not change with the next all-gather."""
        param = self.member.param
        if self.version is not None and param.untyped_storage()._cdata == self.group.buffer_views.key:
            return param.detach()  # has the parameter's counter, so a backward after the next step raises
        return self.group.full.data


def keep_places(outputs: Iterable[torch.Tensor], since: int, groups: Sequence[LentGroup]) -> None:
    """Make autograd save positions instead of parameters and their views; see [Note: buffer views].

    Args:
        outputs: outputs of a unit.
        since: number of the first autograd node of the unit's forward.
        groups: gathered groups of the unit.
    """
    by_memory = {group.buffer_views.key: group for group in groups}
    for node in nodes_since([tensor.grad_fn for tensor in outputs], since):
        for _, saved in saved_by(node):
            if saved.unpack_hook is not None:  # has hooks of other code
                continue
            view = saved.data
            if is_managed(view) and isinstance(node, torch.autograd.function.BackwardCFunction):
                group = by_memory.get(view.untyped_storage()._cdata)  # its backward may use attributes of the parameter
                if group is not None:
                    group.buffer_views.gather_for(node)
            else:
                _Place.keep_view(saved, view, by_memory)


def keep_parameters(node: Any, since: int) -> None:
    """Make autograd save positions instead of parameters, before a backward with `create_graph=True`.

    Args:
        node: autograd node at which the backward of a unit begins.
        since: number of the first autograd node of the unit's forward.
    """
    for user in nodes_since([node], since):
        for name, saved in saved_by(user):
            param: Any = None if saved.unpack_hook is not None else saved.data
            if is_managed(param) and param._ds_member.group.policy.gathers_before_use:
                getattr(user, name)  # unpack it as torch does, which checks its version counter
                member, group = param._ds_member, param._ds_member.group
                start = int(group.full.storage_offset()) + member.offset
                _Place(group, member, member.current_version, member.shape, member.strides, start).keep(saved)


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of the same shape and dtype are bitwise equal (also where both are NaN)."""
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
