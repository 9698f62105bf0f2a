"""Adagrad for parameters with optimizer state in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import OptimizerError
from deepspeed.ops.cpu_optimizer import HostOptimizer
from deepspeed.ops.group_optimizer import State


class DeepSpeedCPUAdagrad(HostOptimizer):
    """Adagrad (Duchi et al. 2011) in host memory: s += g², p -= lr * g / (sqrt(s) + eps); g includes weight decay."""

    kernel = "ds_adagrad"
    moments = ("sum",)

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        moments_dtype: torch.dtype | None = None,
    ) -> None:
        """Create the optimizer; states are allocated at the first step.

        Args:
            model_params: tensors or group dicts (`optimizer.params.*` sets the other arguments).
            lr: learning rate.
            eps: added to the square root of the sum of squares.
            weight_decay: multiple of the weights added to the gradients.
            amsgrad: must be False, since Adagrad's sum never decreases.
            fp32_optimizer_states: whether the sums of 16-bit parameters are fp32, instead of the parameters' dtype.
            moments_dtype: dtype of the sums for all parameters; None: see `fp32_optimizer_states`.

        Raises:
            OptimizerError: `amsgrad` is True, or a value is out of range.
        """
        if amsgrad:
            raise OptimizerError("DeepSpeedCPUAdagrad: amsgrad has no meaning for Adagrad; leave it out")
        super().__init__(
            model_params,
            fp32_optimizer_states=fp32_optimizer_states,
            moments_dtype=moments_dtype,
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
        )

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        for param, grad, state in zip(params, grads, states, strict=True):
            if group["weight_decay"]:
                grad = grad.add(param, alpha=group["weight_decay"])
            state["sum"].addcmul_(grad, grad)
            param.addcdiv_(grad, state["sum"].sqrt().add_(group["eps"]), value=-group["lr"])

    def step_rows(self, group: State, param: Tensor, grad: Tensor) -> None:
        """Update the rows in a sparse gradient of an embedding; sums and values of other rows do not change.

        Raises:
            OptimizerError: weight decay is set, which would change all rows.
        """
        if group["weight_decay"]:
            raise OptimizerError("DeepSpeedCPUAdagrad: weight_decay moves all rows; leave it at 0 for sparse gradients")
        state: State = self.state[param]
        if not state:
            state.update(self.fresh_state(group, param, self._moments_dtype(param)))
        rows, total = grad.indices()[0], state["sum"]
        gradient = grad.values().to(total.dtype) * self.factor
        sums = total[rows].addcmul_(gradient, gradient)
        total[rows] = sums
        step = gradient.div_(sums.sqrt().add_(group["eps"])).mul_(-group["lr"])
        param[rows] = (param[rows].to(step.dtype) + step).to(param.dtype)

    def numbers(self, group: State, state: State) -> tuple[float, ...]:
        """Return the fields of the struct `Adagrad` in optimizers.cpp."""
        return float(group["lr"]), group["eps"], group["weight_decay"]
