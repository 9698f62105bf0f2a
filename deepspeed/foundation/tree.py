"""Nests of lists, tuples, dicts, dataclasses and model outputs: find and map the tensors inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same nest with `change` applied to every tensor; nests without a changed tensor come back as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        made = [map_tensors(change, v) for v in value]
        return value if all(a is b for a, b in zip(value, made, strict=True)) else type(value)(made)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, v) for v in value))
    if type(value) is dict:
        changed = {k: map_tensors(change, v) for k, v in value.items()}
        return value if all(value[k] is changed[k] for k in value) else changed
    return value
