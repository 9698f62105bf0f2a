"""Flattening of dense tensors into one tensor, and back (the operator `utils` of upstream DeepSpeed)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 1-D tensor with the elements of all tensors, in order; for one contiguous tensor, a view."""
    return _flatten_dense_tensors(tensors)


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return views of the 1-D tensor `flat` with the shapes of `tensors`, the inverse of `flatten`."""
    return _unflatten_dense_tensors(flat, tensors)
