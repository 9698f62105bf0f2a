"""The norm of gradients that stand in `.grad`, over a client's model-parallel ranks too, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from deepspeed.comm import ReduceOp, all_reduce


def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, mpu: Any = None
) -> torch.Tensor:
    """The norm of all gradients as if they were one vector.

    Args:
        parameters: one or several; those without a gradient are left out.
        norm_type: p of the p-norm; inf for the largest magnitude.
        mpu: a client's unit with `get_model_parallel_group` and `get_model_parallel_rank`: the norm is over its
            ranks, where only parameters marked `model_parallel` differ and the others count once.

    Returns:
        0-d tensor.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    counted = [p for p in listed if mpu is None or _counts(p, mpu)]
    return _norm([p.grad for p in counted if p.grad is not None], norm_type, mpu)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, mpu: Any = None
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm` (Pascanu et al., 2013).

    Args:
        parameters: one or several.
        max_norm: the limit.
        norm_type: as in `get_grad_norm`.
        mpu: as in `get_grad_norm`.

    Returns:
        The norm before clipping, a 0-d tensor.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    # A managed parameter assembles its gradient at each look: look once.
    found = [(p, gradient) for p in listed if (gradient := p.grad) is not None]
    norm = _norm([gradient for p, gradient in found if mpu is None or _counts(p, mpu)], norm_type, mpu)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in found:
        gradient.mul_(factor.to(gradient.device))
    return norm


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The 2-norm of vectors laid end to end, from their 2-norms: sqrt(sum of squares)."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def _counts(param: torch.Tensor, mpu: Any) -> bool:
    return getattr(param, "model_parallel", False) or mpu.get_model_parallel_rank() == 0


def _norm(gradients: list[torch.Tensor], norm_type: float, mpu: Any) -> torch.Tensor:
    norm = get_total_norm(gradients, norm_type)
    if mpu is None:
        return norm
    group = mpu.get_model_parallel_group()
    if math.isinf(norm_type):
        all_reduce(norm, op=ReduceOp.MAX, group=group)
        return norm
    powers = norm**norm_type
    all_reduce(powers, group=group)
    return powers ** (1.0 / norm_type)
