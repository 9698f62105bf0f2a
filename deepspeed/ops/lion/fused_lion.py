"""Lion that updates parameters and states on their device (`cpu_lion`: states in host memory)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.group_optimizer import GroupOptimizer, State


def lion_update(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
    """Apply Lion (arXiv:2302.06675): p -= lr (sign(b1 m + (1 - b1) g) + weight_decay p); m = b2 m + (1 - b2) g.

    Args:
        group: dict of `lr`, `betas` (b1, b2) and `weight_decay`.
        params: tensors, updated in place.
        grads: one gradient per tensor, of the same dtype.
        states: one dict per tensor, empty before its first step; updated in place.
    """
    beta1, beta2 = group["betas"]
    for param, grad, state in zip(params, grads, states, strict=True):
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        momentum = state["exp_avg"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(momentum.lerp(grad, 1 - beta1).sign_().mul_(group["lr"]))
        momentum.lerp_(grad, 1 - beta2)


class FusedLion(GroupOptimizer):
    """Lion with decoupled weight decay; `lion_update` has the equation."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        """Create the optimizer; states are allocated at the first step.

        Args:
            params: tensors or group dicts (`optimizer.params.*` sets the other arguments).
            lr: learning rate.
            betas: weight of the momentum in the sign, and decay rate of the momentum.
            weight_decay: weight decay, multiplied by the learning rate.
            set_grad_none: whether `zero_grad()` sets gradients to None, instead of zero.

        Raises:
            OptimizerError: a value is out of range.
        """
        self.set_grad_none = set_grad_none
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        lion_update(group, params, grads, states)
