"""Lion for parameters whose states rest in host memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed.ops.group_step import GroupOptimizer, State
from deepspeed.ops.lion.update import lion_update


class DeepSpeedCPULion(GroupOptimizer):
    """Lion with decoupled weight decay."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Keep the groups; states are made at the first step.

        Args:
            model_params: tensors or group dicts (`optimizer.params.*` holds the rest of the arguments).
            lr: learning rate.
            betas: share of the momentum in the sign, and its decay.
            weight_decay: decay per unit of learning rate.
            fp32_optimizer_states: momentum of 16-bit parameters is fp32; otherwise of the parameters' dtype.
        """
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """See `lion_update`."""
        lion_update(group, params, grads, states)
