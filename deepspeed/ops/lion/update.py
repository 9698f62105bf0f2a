"""One Lion update of a list of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.group_optimizer import State


def lion_update(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
    """Lion (Chen et al. 2023, algorithm 2): p -= lr * (sign(b1 * m + (1 - b1) * g) + decay * p), then m moves by b2.

    Args:
        group: `lr`, `betas`, `weight_decay`.
        params: tensors updated in place.
        grads: one of the same dtype for each.
        states: one dict for each; filled on its first step.
    """
    beta1, beta2 = group["betas"]
    for param, grad, state in zip(params, grads, states, strict=True):
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        momentum = state["exp_avg"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(momentum.lerp(grad, 1 - beta1).sign_().mul_(group["lr"]))
        momentum.lerp_(grad, 1 - beta2)
