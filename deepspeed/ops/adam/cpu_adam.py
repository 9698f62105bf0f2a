"""Adam and AdamW for parameters whose states rest in host memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed.ops.adam.update import adam_update
from deepspeed.ops.group_step import GroupOptimizer, State


class DeepSpeedCPUAdam(GroupOptimizer):
    """AdamW, or Adam with decay in the gradients when `adamw_mode` is false."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Keep the groups; states are made at the first step.

        Args:
            model_params: tensors or group dicts (`optimizer.params.*` holds the rest of the arguments).
            lr: learning rate.
            bias_correction: divide the moments by 1 - beta ** step.
            betas: decay of the first and the second moment.
            eps: added to the root of the second moment.
            weight_decay: decay per unit of learning rate.
            amsgrad: divide by the largest second moment seen.
            adamw_mode: decay the weights themselves (AdamW).
            fp32_optimizer_states: moments of 16-bit parameters are fp32; otherwise of the parameters' dtype.
        """
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """See `adam_update`."""
        adam_update(group, params, grads, states, lr=group["lr"], decoupled=self.adam_w_mode)
