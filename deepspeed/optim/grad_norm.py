"""Gradient norms, clipping by norm, and overflow checks."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from deepspeed.comm import ReduceOp, all_reduce, is_initialized
from deepspeed.native import KINDS, library, threads

# Elements converted to double at once: they stay in the second-level cache.
_CHUNK = 1 << 16


def sum_of_squares(flat: torch.Tensor, exact: bool) -> torch.Tensor:
    """Return the sum of squares as a 0-d float64 tensor, which is finite exactly if every element is.

    Args:
        flat: 1-D, any floating-point dtype.
        exact: compute squares and sums in float64, so that the result does not depend on the division of parameters
            into slices and buckets (required if clipping uses it); False: float32 where that is faster.
    """
    sums = native_sums_of_squares([flat])
    if sums is not None:
        return torch.tensor(sums[0], dtype=torch.float64)
    if flat.device.type != "cpu":
        # float32 squares of finite gradients may overflow.
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    quick = None if exact else torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
    # An infinite float32 sum may come from large squares of finite gradients.
    if quick is not None and quick.isfinite():
        return quick
    total = torch.zeros((), dtype=torch.float64)
    scratch = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float64)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        wide = scratch[: part.numel()].copy_(part)
        total += torch.dot(wide, wide)
    return total


def native_sums_of_squares(flats: Sequence[torch.Tensor]) -> list[float] | None:
    """Return each tensor's float64 sum of squares, from one native call; None if the native library cannot do it."""
    native = library()
    if native is None or not all([flat.is_cpu and flat.is_contiguous() for flat in flats]):
        return None
    dtypes = {flat.dtype for flat in flats}
    if len(dtypes) != 1 or not dtypes <= KINDS.keys():
        return [] if not flats else None
    # Plain arrays: each ctypes array type is a new class, which only the garbage collector frees.
    addresses = array("Q", [flat.data_ptr() for flat in flats])
    numels, sums = array("q", [flat.numel() for flat in flats]), array("d", bytes(8 * len(flats)))
    places = [each.buffer_info()[0] for each in (addresses, numels, sums)]
    function = native.ds_sums_of_squares
    if function.argtypes is None:
        function.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
        ]  # fmt: skip
        function.restype = None
    workers = threads() if max(numels) > _CHUNK else 1
    function(places[0], KINDS[dtypes.pop()], places[1], len(flats), workers, places[2])
    return list(sums)


def clip_factor(norm: float | torch.Tensor, limit: float) -> float | torch.Tensor:
    """Return the factor that limits the gradient norm to `limit` (Pascanu et al., 2013; formula of torch).

    The factor is 1 if `limit` (`gradient_clipping`) is 0 or `norm` is not finite. With a norm that is a 0-d float64
    tensor, it is such a tensor with the same value, computed without a wait for the device.
    """
    if limit <= 0.0:
        return 1.0
    if isinstance(norm, torch.Tensor):
        factor = torch.full_like(norm, limit).div_(norm + 1e-6).clamp_(max=1.0)
        return torch.where(norm.isfinite(), factor, 1.0)
    return min(1.0, limit / (norm + 1e-6)) if math.isfinite(norm) else 1.0


Params = Iterable[torch.Tensor]


class CheckOverflow:
    """Check of gradients for infinities and NaN, on all ranks.

    Args:
        param_groups: default groups for `check`: an optimizer's groups, or lists of parameters; None: no groups.
        mpu: model-parallel unit as in Megatron, an object with `get_model_parallel_group`. If set, the result is
            reduced over that group only, since the data-parallel ranks have the same gradients.
        zero_reduce_scatter: whether to reduce over all ranks even with `mpu`, since gradients are sharded over all.
        deepspeed: accepted for old scripts without effect; an engine does this check in `step`.

    Example:
        >>> if not CheckOverflow(optimizer.param_groups).check():
        ...     optimizer.step()
    """

    def __init__(
        self,
        param_groups: Iterable[Any] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.params = self._flat(param_groups or ())
        self.mpu, self.zero_reduce_scatter = mpu, zero_reduce_scatter

    def check(self, param_groups: Iterable[Any] | None = None) -> bool:
        """Return whether a gradient on any rank is not finite. All ranks must call this.

        Args:
            param_groups: groups to check; None: those of the constructor.
        """
        return self.has_overflow(self.params if param_groups is None else self._flat(param_groups))

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Return whether computed norms indicate an overflow: a norm of -1, infinity or NaN.

        Args:
            norm_group: norms of this rank's gradients.
            reduce_overflow: whether to combine the results of all ranks, which then must all call this.
        """
        overflow = any(norm == -1 or not torch.isfinite(torch.as_tensor(float(norm))) for norm in norm_group)
        return self._anywhere(overflow) if reduce_overflow else overflow

    def has_overflow_serial(self, params: Params) -> bool:
        """Return whether a gradient of `params` on this rank is not finite."""
        return any(self._has_inf_or_nan(grad) for p in params if (grad := p.grad) is not None)

    def has_overflow(self, params: Params, has_moe_params: bool | None = None) -> bool:
        """Return whether a gradient of `params` on any rank is not finite. All ranks must call this.

        `has_moe_params` is accepted without effect.
        """
        return self._anywhere(self.has_overflow_serial(params))

    def _anywhere(self, overflow: bool) -> bool:
        if not is_initialized():
            return overflow
        group = None if self.mpu is None or self.zero_reduce_scatter else self.mpu.get_model_parallel_group()
        flag = torch.tensor([float(overflow)])
        all_reduce(flag, op=ReduceOp.MAX, group=group)
        return bool(flag.item())

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor, j: Any = None) -> bool:
        return not bool(torch.isfinite(x.float().sum()) or torch.isfinite(x).all())

    @staticmethod
    def _flat(groups: Iterable[Any]) -> list[torch.Tensor]:
        params: list[torch.Tensor] = []
        for group in groups:
            inside = group["params"] if isinstance(group, dict) else group
            params += [inside] if isinstance(inside, torch.Tensor) else list(inside)
        return params


def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0, mpu: Any = None
) -> torch.Tensor:
    """Return the p-norm of all gradients, taken as one vector.

    Args:
        parameters: one or several parameters; those without a gradient are ignored.
        norm_type: p of the p-norm; inf: the maximum norm.
        mpu: model-parallel unit with `get_model_parallel_group` and `get_model_parallel_rank`; None: this rank alone.
            With a unit, all ranks of its group must call this, and the norm is over these ranks; parameters without
            the mark `model_parallel` count once.

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
        parameters: one or several parameters.
        max_norm: maximum of the norm.
        norm_type: as in `get_grad_norm`.
        mpu: as in `get_grad_norm`.

    Returns:
        The norm before clipping, a 0-d tensor.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    # A parameter that ZeRO manages assembles its gradient at each access: access it once.
    gradients = [(p, gradient) for p in listed if (gradient := p.grad) is not None]
    norm = _norm([gradient for p, gradient in gradients if mpu is None or _counts(p, mpu)], norm_type, mpu)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Combine 2-norms of vectors into the 2-norm of their concatenation: sqrt(sum of squares)."""
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
