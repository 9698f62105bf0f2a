"""Copying of tensors for `torch.save`; other programs import this module."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested containers in which every tensor has its own storage.

    `torch.save` writes the whole storage of a view; of a copy, it writes only the elements of the view.

    Args:
        item: tensors in dicts, lists and tuples, whose classes are kept (other mappings become dicts); other objects
            are not copied.
        device: device of the copies.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, Mapping):
        clones = {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
        if not isinstance(item, (dict, UserDict)):
            return clones
        copied = copy.copy(item)  # unlike a call of its class, this works for all: `defaultdict` takes a function first
        for key, value in clones.items():
            copied[key] = value
        return copied
    if isinstance(item, (list, tuple)):
        values = [clone_tensors_for_torch_save(value, device) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    return item
