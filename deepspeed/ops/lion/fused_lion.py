"""Lion under the name of the device form."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed.ops.group_optimizer import GroupOptimizer, State
from deepspeed.ops.lion.update import lion_update


class FusedLion(GroupOptimizer):
    """Lion with decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        """Keep the groups; states are made at the first step.

        Args:
            params: tensors or group dicts (`optimizer.params.*` holds the rest of the arguments).
            lr: learning rate.
            betas: share of the momentum in the sign, and its decay.
            weight_decay: decay per unit of learning rate.
            set_grad_none: `zero_grad()` drops gradients instead of filling them with zeros.
        """
        self.set_grad_none = set_grad_none
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """See `lion_update`."""
        lion_update(group, params, grads, states)
