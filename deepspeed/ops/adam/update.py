"""One Adam update of a list of tensors, on torch's fused kernel wherever it can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from deepspeed.ops.group_step import State

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")
# A step count at which 1 - beta ** step is 1 for every beta below one: both bias corrections vanish.
FAR = 2.0**60


def adam_update(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[State], *, lr: Any, decoupled: bool
) -> None:
    """Adam (Kingma and Ba 2015, algorithm 1) or, when `decoupled`, AdamW (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        group: `betas`, `eps`, `weight_decay`; `bias_correction`, `amsgrad` and `maximize` when they are set.
        params: tensors updated in place.
        grads: one of the same dtype for each.
        states: one dict for each; filled on its first step.
        lr: learning rate of this update.
        decoupled: decay the weights themselves (AdamW) instead of adding to the gradients.
    """
    amsgrad = group.get("amsgrad", False)
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in params)
    for param, state in zip(params, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
            if amsgrad:
                state["max_exp_avg_sq"] = torch.zeros_like(param)
        # The fused kernel wants the step counts beside the tensors, the for-loop wants them on the host.
        state["step"] = state["step"].to(param.device if fused else "cpu")
    steps = [state["step"] for state in states]
    if not group.get("bias_correction", True):
        for step in steps:
            step += 1
        steps = [torch.full_like(step, FAR) for step in steps]
    adam(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if amsgrad else [],
        steps,
        fused=fused,
        amsgrad=amsgrad,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group.get("maximize", False),
        decoupled_weight_decay=decoupled,
    )
