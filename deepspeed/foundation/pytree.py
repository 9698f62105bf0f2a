"""Search of tensors in nested containers, dataclasses and model outputs; mapping in lists, tuples and dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested mappings, lists, tuples, sets and dataclasses, in order."""
    yield from leaves_in(value, torch.Tensor)


def leaves_in(value: Any, kinds: type[Any] | tuple[type[Any], ...]) -> Iterator[Any]:
    """Yield every object of the classes `kinds` in nested containers, as `tensors_in`."""
    if isinstance(value, kinds):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from leaves_in(item, kinds)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in cast("Iterable[Any]", value):
            if isinstance(item, kinds):
                yield item
            else:
                yield from leaves_in(item, kinds)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_in(getattr(value, field.name, None), kinds)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return nested lists, tuples and plain dicts with `change` applied to every tensor; other objects are kept."""
    return map_leaves(change, torch.Tensor, value)


def map_leaves(change: Callable[[Any], Any], kinds: type[Any], value: Any) -> Any:
    """Apply `change` as `map_tensors` does, to objects of the class `kinds` instead of tensors."""
    if isinstance(value, kinds):
        return change(value)
    kind = cast("Any", type(value))
    if isinstance(value, (list, tuple)):
        old = cast("Sequence[Any]", value)
        new = [map_leaves(change, kinds, item) for item in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return old
        return kind(*new) if hasattr(kind, "_fields") else kind(new)
    if kind is dict:
        mapping = cast("dict[Any, Any]", value)
        changed = {key: map_leaves(change, kinds, item) for key, item in mapping.items()}
        return mapping if all(mapping[key] is changed[key] for key in mapping) else changed
    return value
