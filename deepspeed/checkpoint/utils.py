"""Copying of tensors for `torch.save`; other programs import this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested containers in which every tensor has its own storage.

    `torch.save` writes the whole storage of a view; of a copy, it writes only the elements of the view.

    Args:
        item: tensors in dicts, lists and tuples; other objects are not copied.
        device: device of the copies.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item
