"""Adam and AdamW, with torch's fused kernel where it is available."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from deepspeed.errors import NotAvailableError
from deepspeed.ops.group_optimizer import GroupOptimizer, State

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")
# A step count at which 1 - beta ** step is 1 for every beta below one: both bias corrections vanish.
FAR = 2.0**60


def adam_update(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[State], *, lr: Any, decoupled: bool
) -> None:
    """Apply Adam (arXiv:1412.6980, algorithm 1), or if `decoupled` AdamW (arXiv:1711.05101, algorithm 2).

    Args:
        group: dict of `betas`, `eps`, `weight_decay`; optionally `bias_correction`, `amsgrad` and `maximize`.
        params: tensors, updated in place.
        grads: one gradient per tensor, of the same dtype.
        states: one dict per tensor, empty before its first step; updated in place.
        lr: learning rate of this update.
        decoupled: whether weight decay is applied to the weights themselves (AdamW), instead of the gradients.
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
        # The fused kernel needs step counts on the parameters' device, the for-loop needs them on the host.
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


def undo_adam(group: dict[str, Any], param: Tensor, grad: Tensor, state: State, *, decoupled: bool) -> None:
    """Undo the last update with `grad`: restore values, moments and step count, up to rounding.

    Args:
        group: as in `adam_update`, with the hyperparameters of that update and `lr`, without `maximize`.
        param: the tensor, changed in place.
        grad: gradient of that update.
        state: state after at least one step, without `max_exp_avg_sq` (amsgrad); changed in place.
        decoupled: as in `adam_update`.
    """
    (beta1, beta2), lr, decay, step = group["betas"], float(group["lr"]), group["weight_decay"], float(state["step"])
    dtype = torch.promote_types(param.dtype, torch.float32)
    gradient, first, second = (t.to(dtype) for t in (grad, state["exp_avg"], state["exp_avg_sq"]))
    corrects = group.get("bias_correction", True)
    mean, square = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
    before = param.to(dtype) + lr / mean * first / ((second / square).sqrt() + group["eps"])
    if decoupled:
        before = before / (1 - lr * decay)
    else:
        gradient = gradient + decay * before
    for moment, beta, power in (("exp_avg", beta1, 1), ("exp_avg_sq", beta2, 2)):
        previous = state[moment].to(dtype) - (1 - beta) * gradient**power
        previous = previous / beta if beta and step > 1 else torch.zeros_like(previous)
        state[moment].copy_(previous.clamp(min=0) if power == 2 else previous)
    param.copy_(before)
    state["step"] -= 1


class FusedAdam(GroupOptimizer):
    """AdamW; with `adam_w_mode=False`, Adam with weight decay added to the gradients. See `adam_update`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Create the optimizer; states are allocated at the first step.

        Args:
            params: tensors or group dicts (`optimizer.params.*` sets the other arguments).
            lr: learning rate.
            bias_correction: whether the moments are divided by 1 - beta ** step.
            betas: decay rates of the first and the second moment.
            eps: added to the square root of the second moment.
            adam_w_mode: whether weight decay is applied to the weights themselves (AdamW).
            weight_decay: factor of the weights; AdamW multiplies it by the learning rate.
            amsgrad: must be False; torch.optim.AdamW (`"torch_adam": true`) and DeepSpeedCPUAdam support it.
            set_grad_none: whether `zero_grad()` sets gradients to None, instead of zero.

        Raises:
            NotAvailableError: `amsgrad` is True.
            OptimizerError: a value is out of range.
        """
        if amsgrad:
            raise NotAvailableError(
                'FusedAdam has no amsgrad; use torch.optim.AdamW ("torch_adam": true in optimizer.params)'
            )
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        super().__init__(
            params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay
        )

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        adam_update(group, params, grads, states, lr=group["lr"], decoupled=self.adam_w_mode)
