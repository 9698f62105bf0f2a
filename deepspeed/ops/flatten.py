"""Flattening of dense tensors into one tensor, and back: upstream's operator `utils`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy all elements into a 1-D tensor, tensor by tensor; all have the same dtype."""
    return _flatten_dense_tensors(tensors)


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return views of `flat` in the shapes of `tensors`."""
    return _unflatten_dense_tensors(flat, tensors)
