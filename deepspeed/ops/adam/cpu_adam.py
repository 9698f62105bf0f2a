"""Adam and AdamW for parameters with optimizer state in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError, OptimizerError, UsageError
from deepspeed.ops.adam.fused_adam import adam_update, undo_adam
from deepspeed.ops.cpu_optimizer import Fold, HostOptimizer
from deepspeed.ops.group_optimizer import State


class DeepSpeedCPUAdam(HostOptimizer):
    """AdamW in host memory; with `adamw_mode=False`, Adam with weight decay added to gradients. See `adam_update`."""

    kernel = "ds_adam"
    moments = ("exp_avg", "exp_avg_sq")

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
        moments_dtype: torch.dtype | None = None,
    ) -> None:
        """Create the optimizer; states are allocated at the first step. Other arguments are those of `FusedAdam`.

        Args:
            amsgrad: whether updates are divided by the running maximum of the second moment (arXiv:1904.09237).
            adamw_mode: whether weight decay is applied to the weights themselves (AdamW).
            fp32_optimizer_states: whether the moments of 16-bit parameters are fp32, instead of the parameters' dtype.
            moments_dtype: dtype of the moments for all parameters; None: see `fp32_optimizer_states`.

        Raises:
            OptimizerError: a value is out of range.
        """
        self.adam_w_mode = adamw_mode
        super().__init__(
            model_params,
            fp32_optimizer_states=fp32_optimizer_states,
            moments_dtype=moments_dtype,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        adam_update(group, params, grads, states, lr=group["lr"], decoupled=self.adam_w_mode)

    def numbers(self, group: State, state: State) -> tuple[float, ...]:
        """Return the fields of the struct `Adam` in optimizers.cpp."""
        lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        first, root = 1.0, 1.0
        if group["bias_correction"]:
            step = float(state["step"])
            first, root = 1 - beta1**step, math.sqrt(1 - beta2**step)
        decay_factor, l2 = (1 - lr * decay, 0.0) if self.adam_w_mode else (1.0, decay)
        # Numerator and denominator of the step are multiplied by `root`, which saves a division per element.
        return 1 - beta1, beta2, 1 - beta2, lr / first * root, group["eps"] * root, decay_factor, l2

    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Update one tensor from its `.grad`; None: no update.

        Args:
            subgroup_id: index of the tensor, counted over all groups.
            closure: evaluates the model again and returns the loss; None: not called.

        Returns:
            The closure's result, or None.

        Raises:
            ArgumentError: the index is out of range.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        group, param = self._subgroup(subgroup_id)
        if param.grad is not None:
            with torch.no_grad():
                self._step_param(group, param, Fold(param.grad))
        return loss

    def rollback_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last `step_subgroup` of a tensor, up to rounding; the gradient must still be the same.

        Args:
            subgroup_id: as in `step_subgroup`.
            closure: as in `step_subgroup`.

        Returns:
            The closure's result, or None.

        Raises:
            ArgumentError: the index is out of range.
            UsageError: the tensor has not been updated, or its gradient is None.
            OptimizerError: amsgrad is set: its running maximum cannot be undone.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        group, param = self._subgroup(subgroup_id)
        state: State = self.state[param]
        if group["amsgrad"]:
            raise OptimizerError("rollback_subgroup: amsgrad keeps the largest moment alone, which cannot be undone")
        if param.grad is None or not state or not state["step"]:
            raise UsageError(
                f"rollback_subgroup({subgroup_id}): there is no step to undo; call it after step_subgroup, with the "
                "gradient still there"
            )
        with torch.no_grad():
            undo_adam(group, param, param.grad, state, decoupled=self.adam_w_mode)
        return loss

    def _subgroup(self, number: int) -> tuple[State, Tensor]:
        tensors = [(group, param) for group in self.param_groups for param in group["params"]]
        if not 0 <= number < len(tensors):
            raise ArgumentError(f"subgroup_id {number}: there are {len(tensors)} tensors, the first is 0")
        return tensors[number]

    def fresh_state(self, group: State, param: Tensor, dtype: torch.dtype) -> State:
        state = {"step": torch.zeros((), dtype=torch.float32), **super().fresh_state(group, param, dtype)}
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        return state
