"""Lion for parameters with optimizer state in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.cpu_optimizer import HostOptimizer
from deepspeed.ops.group_optimizer import State
from deepspeed.ops.lion.fused_lion import lion_update


class DeepSpeedCPULion(HostOptimizer):
    """Lion in host memory, with decoupled weight decay; `lion_update` has the equation."""

    kernel = "ds_lion"
    moments = ("exp_avg",)

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        moments_dtype: torch.dtype | None = None,
    ) -> None:
        """Create the optimizer; states are allocated at the first step. Other arguments are those of `FusedLion`.

        Args:
            fp32_optimizer_states: whether the momentum of 16-bit parameters is fp32, instead of the parameters' dtype.
            moments_dtype: dtype of the momentum for all parameters; None: see `fp32_optimizer_states`.

        Raises:
            OptimizerError: a value is out of range.
        """
        super().__init__(
            model_params,
            fp32_optimizer_states=fp32_optimizer_states,
            moments_dtype=moments_dtype,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
        )

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        lion_update(group, params, grads, states)

    def numbers(self, group: State, state: State) -> tuple[float, ...]:
        """Return the fields of the struct `Lion` in optimizers.cpp."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return lr, 1 - beta1, 1 - beta2, 1 - lr * group["weight_decay"]
