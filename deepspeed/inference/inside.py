"""What a model keeps inside its modules between two tokens, apart from any cache: each request has its own."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_MISSING = object()
Table = dict[str, Any]


class Inside:
    """What one request has put into the attributes and buffers of a model's modules.

    Some recurrent models hold their state there, rotations the longest length that they have seen: requests that take
    turns would go on with each other's. Values are exchanged, not copied: what a model changes in place counts as its
    own only in tensors that it put there itself. Plain numbers alone, such as a hook's count, are left where they are.

    Args:
        model: its modules may be others from turn to turn.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: list[tuple[Table, str, Any]] = []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, modules have what this request left there; afterwards, what they had before."""
        before = [(module, vars(module).copy(), module._buffers.copy()) for module in self._model.modules()]
        for table, name, value in self._own:
            _put(table, name, value)
        try:
            yield
        finally:
            self._own = []
            for module, attributes, buffers in before:
                found = [*_changed(vars(module), attributes), *_changed(module._buffers, buffers)]
                if all(value is _MISSING or isinstance(value, int | float) for *_, pair in found for value in pair):
                    continue
                for table, name, (now, was) in found:
                    self._own.append((table, name, now))
                    _put(table, name, was)


def _changed(table: Table, before: Table) -> Iterator[tuple[Table, str, tuple[Any, Any]]]:
    """(table, name, (value now, value before)) of what is another object."""
    if table.keys() == before.keys() and all(map(operator.is_, table.values(), before.values())):
        return
    for name in {**before, **table}:
        pair = table.get(name, _MISSING), before.get(name, _MISSING)
        if pair[0] is not pair[1]:
            yield table, name, pair


def _put(table: Table, name: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(name, None)
    else:
        table[name] = value
