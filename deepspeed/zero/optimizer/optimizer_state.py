"""Optimizer state as a mapping: by leaf for the inner optimizer, by model parameter for all other code.

[Note: state by parameter] The inner optimizer runs on leaves, so its state has leaves as keys. Code that resets, prunes
or copies state (ReLoRA, merges of adapters, rollbacks) has the model's parameters. `OptimizerState` accepts both: a
leaf is a plain dict key, a parameter selects the state of its leaf, and iteration yields parameters, except while the
optimizer itself runs or saves. A rank without elements of a parameter returns entries with the same names as other
ranks, so that code which depends on them takes the same decisions on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from deepspeed.errors import UsageError
from deepspeed.optim.nested import join_states, nested_optimizers
from deepspeed.optim.separability import UpdateTraits
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.optimizer.state_tensor import Away, Piece, StateTensor
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord

_NOTHING: Any = object()


class Owner(Protocol):
    """Attributes of the sharded optimizer that its state uses; see `optimizer.ZeroOptimizer`."""

    optimizer: torch.optim.Optimizer
    fragments: dict[int, list[Fragment]]  # fragments of this rank, by `ParamRecord.uid`
    bit16_groups: list[list[Parameter]]  # model parameters in each group of the optimizer
    traits: UpdateTraits  # traits of the inner optimizer; if `known`, it has no nested optimizers


class ParamState(MutableMapping[str, Any]):
    """Optimizer state of one model parameter, by name; a mutable view of `OptimizerState`.

    Args:
        state: state of the optimizer.
        member: parameter.
        fragment: this rank's part of the parameter; None if it has none.
    """

    __slots__ = ("_fragment", "_member", "_state")

    def __init__(self, state: OptimizerState, member: ParamRecord, fragment: Fragment | None) -> None:
        self._state, self._member, self._fragment = state, member, fragment

    @property
    def exists(self) -> bool:
        """Return whether the parameter has an entry (on other ranks, if this rank has no elements of it)."""
        if self._fragment is None:
            return self._member.uid in self._state.elsewhere
        return dict.__contains__(self._state, self._fragment.leaf)

    @property
    def param(self) -> Parameter:
        return self._member.param

    @property
    def leaf(self) -> Parameter | None:
        return None if self._fragment is None else self._fragment.leaf

    def create(self) -> ParamState:
        """Create an empty entry unless one exists, and return self."""
        if self._fragment is None:
            self._state.elsewhere.setdefault(self._member.uid, False)
        elif not self.exists:
            dict.__setitem__(self._state, self._fragment.leaf, {})
        return self

    def note(self, filled: bool) -> None:
        """Record whether other ranks have state of a parameter of which this rank has no elements."""
        self._state.elsewhere.pop(self._member.uid, None)
        if filled:
            self._state.elsewhere[self._member.uid] = True

    def forget(self) -> None:
        if self._fragment is None:
            self._state.elsewhere.pop(self._member.uid, None)
        else:
            dict.pop(self._state, self._fragment.leaf, None)

    def taken(self) -> dict[str, Any]:
        """Return the entries; offloaded values are copied, so that they stay valid after `forget`."""
        taken = {}
        for key, value in self.items():
            rests = value._ds_piece.local if isinstance(value, StateTensor) else value
            taken[key] = value.clone() if isinstance(rests, Away) else value
        return taken

    @property
    def _entries(self) -> dict[str, Any]:
        """Return the entries; if this rank has no elements, those of another parameter as a template (or {})."""
        if self._fragment is not None:
            return dict.get(self._state, self._fragment.leaf, {})
        return self._state.example(self._member) if self._state.elsewhere.get(self._member.uid) else {}

    @property
    def _cut(self) -> bool:
        """Return whether the state is sharded over ranks."""
        group = self._member.group
        return group.policy.owns_a_shard and group.axis.size > 1

    def __getitem__(self, key: str) -> Any:
        entries, member, fragment = self._entries, self._member, self._fragment
        if fragment is None and self._state.elsewhere.get(member.uid) and key not in entries:
            value: Any = torch.empty(0, dtype=member.group.updated.dtype)  # no KeyError on this rank alone
        else:
            value = entries[key]
        if not isinstance(value, torch.Tensor) or not value.dim() or not self._cut:
            return value.clone() if fragment is None and isinstance(value, torch.Tensor) else value
        if fragment is None:
            empty = torch.empty(0, dtype=value.dtype, device=member.group.tiers.optimizer.lends_on(member.group.device))
            return StateTensor.of(Piece(member, key, empty, member.shape, 0))
        sliced = value.shape == fragment.leaf.shape
        shape, start = (member.shape, fragment.range.start) if sliced else (value.shape, None)
        return StateTensor.of(Piece(member, key, value, shape, start))

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __setitem__(self, key: str, value: Any) -> None:
        shape = self._member.shape
        if self._cut and isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
            if not isinstance(value, StateTensor):
                raise UsageError(
                    f"optimizer state {key!r} of parameter '{self._member.name}' was given the shape "
                    f"{tuple(value.shape)}: state that is sharded over ranks has the parameter's, {tuple(shape)}, or "
                    f"no dims; deepspeed.utils.safe_set_full_optimizer_state sets what is there"
                )
        self.create()
        if self._fragment is None:
            self._state.elsewhere[self._member.uid] = True
        else:
            dict.__getitem__(self._state, self._fragment.leaf)[key] = self._local(self._fragment, key, value)

    def _local(self, fragment: Fragment, key: str, value: Any) -> Any:
        """Return this rank's part of an assigned value; UsageError for a state tensor of another parameter."""
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        live = self._entries.get(key)
        if isinstance(value, StateTensor):
            piece = value._ds_piece
            if piece.member is not self._member:
                raise piece.refuse(
                    f"assignment to the state of '{self._member.name}', which is sharded in another way,"
                )
            value = piece.local
            return value.clone() if isinstance(value, Away) and value is not live else value
        if isinstance(value, Away) and value is not live:
            value = value.clone()  # a placeholder must not be used for two entries
        if value.shape != self._member.shape:
            return value
        there = isinstance(live, torch.Tensor) and live.shape == fragment.leaf.shape
        dtype = (live if there else fragment.leaf).dtype  # type: ignore[union-attr]
        if self._cut:
            value = fragment.cut_state({key: value})[key]
        return value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value

    def __delitem__(self, key: str) -> None:
        if self._fragment is not None:
            del dict.get(self._state, self._fragment.leaf, {})[key]

    def clear(self) -> None:
        if self._fragment is None:
            if self.exists:
                self._state.elsewhere[self._member.uid] = False
        else:
            dict.get(self._state, self._fragment.leaf, {}).clear()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<optimizer state of {self._member.name}: {', '.join(map(str, self)) or 'empty'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class OptimizerState(defaultdict[Any, Any]):
    """Value of `optimizer.state` of the inner optimizer; see [Note: state by parameter].

    Args:
        owner: sharded optimizer, which maps parameters to leaves; weakly referenced.

    Attributes:
        elsewhere: parameters (`ParamRecord.uid`) with an entry on other ranks only, and whether it is non-empty.
        of_others: `outline` of another rank, if ranks have exchanged it.
        packing: whether the inner optimizer's `state_dict` is running, which needs leaves as keys.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__(dict)
        self._owner = weakref.ref(owner)
        self.elsewhere: dict[int, bool] = {}
        self.of_others: dict[str, Any] = {}
        self.packing = False
        self._inside = 0  # number of open `by_leaf` contexts

    @contextlib.contextmanager
    def by_leaf(self) -> Iterator[None]:
        """Return a context in which iteration yields leaves, for the inner optimizer's own code."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def without_parameter(self) -> dict[str, Any]:
        """Return the entries whose key is a string instead of a parameter (MADGRAD's `state["k"]`)."""
        return {key: value for key, value in dict.items(self) if isinstance(key, str)}

    def of_leaves(self) -> list[dict[str, Any]]:
        """Return a list with the state, by name, of each leaf of this rank that has state."""
        return [entry for key, entry in dict.items(self) if not isinstance(key, str)]

    def example(self, member: ParamRecord) -> dict[str, Any]:
        """Return the entries of this rank's first leaf with state, as a template; else another rank's outline."""
        owner = self._owner()
        for group in [] if owner is None else owner.optimizer.param_groups:
            for leaf in group["params"]:
                if entries := dict.get(self, leaf):
                    return entries
        return self.of_others

    def outline(self) -> dict[str, Any]:
        """Return the entries of this rank's first parameter with state, with empty tensors, to send to other ranks."""
        return {
            key: value.new_empty(0, device="cpu") if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in next((entries for entries in dict.values(self) if entries), {}).items()
        }

    def note_updated(self, members: Sequence[ParamRecord]) -> None:
        """Record that other ranks now have state of updated parameters of which this rank has no elements."""
        owner = self._owner()
        if owner is not None:
            absent = [member.uid for member in members if owner.fragments.get(member.uid) == []]
            self.elsewhere.update(dict.fromkeys(absent, True))

    def view(self, key: Any) -> ParamState | None:
        """Return the state of a model parameter (which may not exist yet); None for any other key."""
        owner = self._owner()
        if owner is None or not is_managed(key) or key._ds_member.uid not in owner.fragments:
            return None
        member = key._ds_member
        fragments = owner.fragments[member.uid]
        return ParamState(self, member, fragments[0] if fragments else None)

    # -- by any key -----------------------------------------------------------------------------------------------

    def __missing__(self, key: Any) -> Any:
        view = self.view(key)
        return super().__missing__(key) if view is None else view.create()

    def __contains__(self, key: object) -> bool:
        view = self.view(key)
        return super().__contains__(key) if view is None else view.exists

    def get(self, key: Any, default: Any = None) -> Any:
        view = self.view(key)
        if view is None:
            return super().get(key, default)
        return view if view.exists else default

    def __setitem__(self, key: Any, value: Any) -> None:
        view = self.view(key)
        if view is None:
            super().__setitem__(key, value)
        elif not isinstance(value, Mapping):
            raise UsageError(
                f"the optimizer state of a parameter is a dict of tensors by name, got {type(value).__name__}; "
                f"deepspeed.utils.safe_set_full_optimizer_state sets one of them"
            )
        elif not (isinstance(value, ParamState) and value._member is view._member):
            entries = dict(value)
            view.create().clear()
            view.update(entries)

    def __delitem__(self, key: Any) -> None:
        view = self.view(key)
        if view is None:
            super().__delitem__(key)
        elif not view.exists:
            raise KeyError(key)
        else:
            view.forget()

    def pop(self, key: Any, default: Any = _NOTHING) -> Any:
        view = self.view(key)
        if view is None:
            return super().pop(key) if default is _NOTHING else super().pop(key, default)
        if not view.exists:
            if default is _NOTHING:
                raise KeyError(key)
            return default
        taken = view.taken()
        view.forget()
        return taken

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def clear(self) -> None:
        super().clear()
        self.elsewhere.clear()

    # -- all keys -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._by_leaf else iter(self._keys())

    def __len__(self) -> int:
        return super().__len__() if self._by_leaf else len(self._keys())

    # Implementations that use the methods above; those of dict would bypass them.
    keys: Any = MutableMapping.keys
    values: Any = MutableMapping.values
    items: Any = MutableMapping.items
    update: Any = MutableMapping.update

    def popitem(self) -> tuple[Any, Any]:
        keys = list(self)
        if not keys:
            raise KeyError("the optimizer has no state")
        return keys[-1], self.pop(keys[-1])

    def copy(self) -> dict[Any, Any]:  # type: ignore[override]
        return dict(self.items())

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(list(dict.items(self)))

    @property
    def _by_leaf(self) -> bool:
        return self.packing or self._inside > 0 or self._owner() is None

    def _keys(self) -> list[Any]:
        """Return the parameters with state on any rank, in the order of the groups, and then all other keys."""
        leaves, views = set[int](), self.views()
        for view in views:
            leaves.add(id(view.leaf))
        return [v.param for v in views if v.exists] + [k for k in super().__iter__() if id(k) not in leaves]

    def views(self) -> list[ParamState]:
        """Return the state of each parameter in the optimizer's groups, in their order, also where there is none."""
        owner = self._owner()
        params = [] if owner is None else [param for group in owner.bit16_groups for param in group]
        return [view for view in map(self.view, params) if view is not None]


def follow(owner: Owner) -> None:
    """Register hooks on the inner optimizer: `state_dict` uses leaves as keys, `load_state_dict` ends with `adopt`.

    Args:
        owner: sharded optimizer.
    """
    inner, reference = owner.optimizer, weakref.ref(owner)

    def pack(packing: bool, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer.state, OptimizerState):
            optimizer.state.packing = packing

    def loaded(_optimizer: torch.optim.Optimizer) -> None:
        owner = reference()
        if owner is not None and owner.fragments:
            adopt(owner)

    inner.register_state_dict_pre_hook(functools.partial(pack, True))
    inner.register_state_dict_post_hook(functools.partial(pack, False))
    inner.register_load_state_dict_post_hook(loaded)


def adopt(owner: Owner) -> OptimizerState:
    """Convert `state` of the inner optimizer to an `OptimizerState`, unless it is one already.

    `load_state_dict` and user code may have replaced `state` by a plain dict. Nested optimizers share the new state.

    Args:
        owner: sharded optimizer.

    Returns:
        State of the inner optimizer.
    """
    inner = owner.optimizer
    before = inner.state
    if not (isinstance(before, OptimizerState) and before._owner() is owner):
        state, loaded = OptimizerState(owner), False
        for key, value in list(dict.items(before) if isinstance(before, dict) else before.items()):
            loaded = loaded or not is_managed(key)
            if value or not is_managed(key):  # an empty entry is left from a lookup in a plain defaultdict
                state[key] = value
        for view in state.views() if loaded else ():  # loaded state has no information on parameters of other ranks
            if view.leaf is None:
                view.note(True)
        with contextlib.suppress(AttributeError):  # a wrapper whose `state` is a read-only property
            inner.state = state
    if owner.traits.known:
        return inner.state  # type: ignore[return-value]
    nested = list(nested_optimizers(inner).values())
    for each in nested:
        if each.state is before:  # both optimizers shared one state
            each.state = inner.state
    if nested:
        join_states(inner)
    return inner.state  # type: ignore[return-value]
