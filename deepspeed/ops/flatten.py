"""Flattens several dense tensors into one, and back: the operator `utils` of upstream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 1-D copy of all elements, tensor by tensor; all of one dtype."""
    return _flatten_dense_tensors(tensors)


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of `flat` in the shapes of `tensors`."""
    return _unflatten_dense_tensors(flat, tensors)
