"""Adam and AdamW under the name of the device form."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed.errors import NotAvailableError
from deepspeed.ops.adam.update import adam_update
from deepspeed.ops.group_optimizer import GroupOptimizer, State


class FusedAdam(GroupOptimizer):
    """AdamW, or Adam with decay in the gradients when `adam_w_mode` is false."""

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
        """Keep the groups; states are made at the first step.

        Args:
            params: tensors or group dicts (`optimizer.params.*` holds the rest of the arguments).
            lr: learning rate.
            bias_correction: divide the moments by 1 - beta ** step.
            betas: decay of the first and the second moment.
            eps: added to the root of the second moment.
            adam_w_mode: decay the weights themselves (AdamW).
            weight_decay: decay per unit of learning rate.
            amsgrad: refused here; torch.optim.AdamW (`"torch_adam": true`) and DeepSpeedCPUAdam have it.
            set_grad_none: `zero_grad()` drops gradients instead of filling them with zeros.

        Raises:
            NotAvailableError: `amsgrad` is true.
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
        """See `adam_update`."""
        adam_update(group, params, grads, states, lr=group["lr"], decoupled=self.adam_w_mode)
