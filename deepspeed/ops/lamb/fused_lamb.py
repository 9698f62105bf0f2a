"""LAMB optimizer: Adam's update, scaled for each parameter by the ratio of the norms of parameter and update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import NotAvailableError, OptimizerError
from deepspeed.ops.group_optimizer import GroupOptimizer, State


class FusedLamb(GroupOptimizer):
    """LAMB (arXiv:1904.00962, algorithm 2), with the trust ratio clamped to [min_coeff, max_coeff].

    r = m' / (sqrt(v') + eps) + weight_decay * p;  p -= lr * clamp(|p| / |r|) * r, with Adam's bias-corrected moments m'
    and v'. The ratio is 1 if a norm is zero.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        """Create the optimizer; states are allocated at the first step.

        Args:
            params: whole tensors or group dicts (`optimizer.params.*` sets the other arguments).
            lr: as in `FusedAdam`, as are the next three.
            bias_correction: whether the moments are corrected for their start at zero.
            betas: decay rates of the moments.
            eps: addend of the denominator.
            eps_inside_sqrt: whether eps is added before the square root, instead of after it.
            weight_decay: multiple of the weights added to the update.
            max_grad_norm: must be 0; use `gradient_clipping` instead.
            max_coeff: maximum trust ratio.
            min_coeff: minimum trust ratio.
            amsgrad: must be False.

        Raises:
            NotAvailableError: `amsgrad` is True.
            OptimizerError: `max_grad_norm` is not 0, or a value is out of range.
        """
        if amsgrad:
            raise NotAvailableError("FusedLamb has no amsgrad; leave it out")
        if max_grad_norm:
            raise OptimizerError(
                f"FusedLamb: max_grad_norm is {max_grad_norm}; set gradient_clipping in the configuration instead"
            )
        self.eps_inside_sqrt = eps_inside_sqrt
        self._ratios: list[Tensor] = []
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratios of the last step, in the order of the parameters with gradients."""
        return [ratio.item() for ratio in self._ratios]

    def step(self, closure: Any = None) -> Any:
        self._ratios = []
        return super().step(closure)

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        for param, grad, state in zip(params, grads, states, strict=True):
            direction = self._direction(group, param, grad, state)
            weight_norm, update_norm = param.norm(), direction.norm()
            ratio = (weight_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
            ratio = torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
            param.sub_(direction.mul_(ratio * group["lr"]))
            self._ratios.append(ratio)

    def _direction(self, group: State, param: Tensor, grad: Tensor, state: State) -> Tensor:
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = 1.0, 1.0
        if group["bias_correction"]:
            first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        variance = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2) / second
        if self.eps_inside_sqrt:
            root = variance.add_(group["eps"]).sqrt_()
        else:
            root = variance.sqrt_().add_(group["eps"])
        return (state["exp_avg"] / first).div_(root).add_(param, alpha=group["weight_decay"])
