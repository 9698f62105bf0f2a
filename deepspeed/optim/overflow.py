"""Whether gradients hold a number that is not finite, asked by scripts that drive their own optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed.comm import ReduceOp, all_reduce, is_initialized

Params = Iterable[torch.Tensor]


class CheckOverflow:
    """Looks for infinities and NaN in gradients, on all ranks.

    Args:
        param_groups: groups to look at when `check` names none: of an optimizer, or lists of parameters.
        mpu: a client's unit with `get_model_parallel_group`: its ranks are asked too where the others know already.
        zero_reduce_scatter: gradients are split over all ranks, which are all asked; so are they without `mpu`.
        deepspeed: accepted for old scripts; an engine checks by itself in `step`.

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
        self.params = _flat(param_groups or ())
        self.mpu, self.zero_reduce_scatter = mpu, zero_reduce_scatter

    def check(self, param_groups: Iterable[Any] | None = None) -> bool:
        """Whether any rank has such a gradient; all ranks call together."""
        return self.has_overflow(self.params if param_groups is None else _flat(param_groups))

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """The same of norms that were computed already: an overflow is a norm of -1, infinity or NaN.

        Args:
            norm_group: of this rank's gradients.
            reduce_overflow: ask the other ranks too; then all call together.
        """
        found = any(norm == -1 or not torch.isfinite(torch.as_tensor(float(norm))) for norm in norm_group)
        return self._anywhere(found) if reduce_overflow else found

    def has_overflow_serial(self, params: Params) -> bool:
        """Whether a gradient on this rank is not finite."""
        return any(self._has_inf_or_nan(grad) for p in params if (grad := p.grad) is not None)

    def has_overflow(self, params: Params, has_moe_params: bool | None = None) -> bool:
        """Whether a gradient on any rank is not finite; all ranks call together."""
        return self._anywhere(self.has_overflow_serial(params))

    def _anywhere(self, found: bool) -> bool:
        if not is_initialized():
            return found
        group = None if self.mpu is None or self.zero_reduce_scatter else self.mpu.get_model_parallel_group()
        flag = torch.tensor([float(found)])
        all_reduce(flag, op=ReduceOp.MAX, group=group)
        return bool(flag.item())

    @staticmethod
    def _has_inf_or_nan(x: torch.Tensor, j: Any = None) -> bool:
        return not bool(torch.isfinite(x.float().sum()) or torch.isfinite(x).all())


def _flat(groups: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for group in groups:
        inside = group["params"] if isinstance(group, dict) else group
        found += [inside] if isinstance(inside, torch.Tensor) else list(inside)
    return found
