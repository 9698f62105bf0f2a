"""Optimizers that contain other optimizers (Lookahead, SAM), and counters outside of the per-parameter state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer

_PLAIN = (bool, int, float, complex, str, type(None))
# Attributes of torch.optim.Optimizer that are not counters: handled separately, or constant.
_OWN = frozenset({"param_groups", "state", "defaults"})


def nested_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers in an optimizer's attributes or lists and dicts there, recursively, by attribute path."""
    nested: dict[str, Optimizer] = {}
    waiting: list[tuple[str, Any, int]] = [("", optimizer, 1)]
    while waiting:
        path, value, depth = waiting.pop(0)
        if isinstance(value, Optimizer):
            if path:
                if value is optimizer or any(value is known for known in nested.values()):
                    continue
                nested[path] = value
            named = [(n, v) for n, v in vars(value).items() if n not in _OWN and not n.startswith("_optimizer_")]
        elif not depth:
            continue
        elif isinstance(value, (list, tuple)):
            named, depth = [(str(index), item) for index, item in enumerate(value)], depth - 1
        else:
            named, depth = [(str(key), item) for key, item in value.items()], depth - 1
        prefix = f"{path}." if path else ""
        waiting += [(prefix + name, v, depth) for name, v in named if isinstance(v, (Optimizer, list, tuple, dict))]
    return nested


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer and of its nested optimizers, each dict once."""
    every = [optimizer, *nested_optimizers(optimizer).values()]
    return list({id(group): group for each in every for group in each.param_groups}.values())


class NestedState(MutableMapping[Tensor, Any]):
    """State of a nested optimizer, stored in the per-parameter entries of the outer optimizer's state.

    Keys of an entry begin with the attribute path of the nested optimizer and a dot (`base.exp_avg`). So code that
    moves, saves or reads the outer state covers the nested state. The outer `state` is looked up at each access,
    so it may be replaced.

    Args:
        optimizer: the outer optimizer.
        prefix: attribute path of the nested optimizer and a dot.
    """

    def __init__(self, optimizer: Optimizer, prefix: str) -> None:
        self._optimizer, self.prefix = weakref.ref(optimizer), prefix

    @property
    def outer(self) -> MutableMapping[Tensor, Any]:
        """Return the per-parameter state of the outer optimizer."""
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer.state

    def __getitem__(self, key: Tensor) -> _NestedEntry:
        return _NestedEntry(self.outer[key], self.prefix)

    def __setitem__(self, key: Tensor, value: Any) -> None:
        entry = self[key]
        entry.clear()
        entry.update(value)

    def __delitem__(self, key: Tensor) -> None:
        if key not in self:
            raise KeyError(key)
        self[key].clear()

    def __iter__(self) -> Iterator[Tensor]:
        return (key for key in list(self.outer) if len(_NestedEntry(self.outer[key], self.prefix)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return key in self.outer and len(_NestedEntry(self.outer[key], self.prefix)) > 0  # type: ignore[index]


class _NestedEntry(MutableMapping[str, Any]):
    def __init__(self, entry: MutableMapping[str, Any], prefix: str) -> None:
        self._entry, self._prefix = entry, prefix

    def __getitem__(self, key: str) -> Any:
        return self._entry[self._prefix + key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entry[self._prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self._entry[self._prefix + key]

    def __iter__(self) -> Iterator[str]:
        start = len(self._prefix)
        return (key[start:] for key in list(self._entry) if isinstance(key, str) and key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def join_states(optimizer: Optimizer) -> None:
    """Move the state of nested optimizers into the state of the outer one; see `NestedState`."""
    joined = {id(optimizer.state)}
    for path, nested in nested_optimizers(optimizer).items():
        if id(nested.state) in joined or isinstance(nested.state, NestedState):
            continue  # the class already shares its state
        state = NestedState(optimizer, f"{path}.")
        for key, value in nested.state.items():
            state[key] = value
        nested.state = state  # type: ignore[assignment]


@dataclass
class Counters:
    """Snapshot of the hyperparameters and counters of an optimizer and of its nested optimizers.

    Attributes:
        groups: (parameter group, its values without the parameters).
        attributes: (optimizer, its attributes of numbers, strings and one-element tensors).
        named: (optimizer, entries of its state whose keys are names instead of parameters).
    """

    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    attributes: list[tuple[Optimizer, dict[str, Any]]]
    named: list[tuple[Optimizer, dict[str, Any]]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Counters:
        every = [optimizer, *nested_optimizers(optimizer).values()]
        groups = [
            (group, {key: cls._copied(value) for key, value in group.items() if key != "params"})
            for group in groups_of(optimizer)
        ]
        named = [(each, {k: cls._copied(each.state[k]) for k in cls._names_in(each.state)}) for each in every]
        return cls(
            groups,
            [
                (each, {k: cls._copied(v) for k, v in vars(each).items() if k not in _OWN and cls._is_plain(v)})
                for each in every
            ],
            named,
        )

    def restore(self) -> None:
        """Restore the snapshot in the optimizers, so that a step in several calls counts as one."""
        for group, values in self.groups:
            for key in set(group) - set(values) - {"params"}:
                del group[key]
            for key, value in values.items():
                group[key] = self._written(group.get(key), value)
        for optimizer, values in self.attributes:
            there = vars(optimizer)
            for key, value in values.items():
                same = type(there.get(key)) is type(value) and not isinstance(value, Tensor)
                if not same or there.get(key) != value:
                    setattr(optimizer, key, self._written(there.get(key), value))
        for optimizer, values in self.named:
            state: Any = optimizer.state
            for key in set(self._names_in(state)) - set(values):
                del state[key]
            for key, value in values.items():
                state[key] = self._written(state.get(key), value)

    @staticmethod
    def _names_in(state: MutableMapping[Any, Any]) -> list[Any]:
        """Return the keys of a state that are names instead of parameters."""
        return [key for key in dict.keys(state) if isinstance(key, str)] if isinstance(state, dict) else []

    @classmethod
    def _is_plain(cls, value: Any, depth: int = 2) -> bool:
        if isinstance(value, Tensor):
            return value.numel() == 1
        if depth and isinstance(value, (list, tuple)):
            return all(cls._is_plain(item, depth - 1) for item in value)
        if depth and type(value) is dict:
            return all(isinstance(key, _PLAIN) and cls._is_plain(item, depth - 1) for key, item in value.items())
        return isinstance(value, _PLAIN)

    @classmethod
    def _copied(cls, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        if type(value) is list:
            return [cls._copied(item) for item in value]
        if type(value) is dict:
            return {key: cls._copied(item) for key, item in value.items()}
        return value

    @classmethod
    def _written(cls, place: Any, value: Any) -> Any:
        """Return the value to restore: the existing tensor after a copy into it, or a copy of the value."""
        if isinstance(value, Tensor) and isinstance(place, Tensor):
            return place.copy_(value) if place is not value else place
        return cls._copied(value)
