"""The global gradient norm and the factor that clips it."""

from __future__ import annotations

import math

import torch

# Elements converted to double at once: they stay in the second-level cache.
_CHUNK = 1 << 16


def sum_of_squares(flat: torch.Tensor, exact: bool) -> torch.Tensor:
    """The sum of squares as a 0-d float64 tensor.

    Args:
        flat: 1-D, any floating dtype.
        exact: form squares and sums in float64, so that the result does not depend on how parameters were cut into
            slices and buckets (needed when clipping feeds it back); else in float32, one pass.
    """
    if not exact or flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dtype=torch.float32 if not exact else torch.float64).double().square()
    total = torch.zeros((), dtype=torch.float64)
    scratch = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float64)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        wide = scratch[: part.numel()].copy_(part)
        total += torch.dot(wide, wide)
    return total


def clip_factor(norm: float, limit: float) -> float:
    """Factor for all gradients so that their norm is at most `limit` (Pascanu et al., 2013; as torch forms it).

    Args:
        norm: global norm before clipping.
        limit: `gradient_clipping`; 0 turns clipping off.
    """
    if limit <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
