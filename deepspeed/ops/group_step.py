"""The step shared by our optimizers: each group's tensors, in the precision of the update, go to one method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import OptimizerError

State = dict[str, Any]
LOW_PRECISION = (torch.float16, torch.bfloat16)


class GroupOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose subclass updates the tensors of one group at a time.

    Given group dicts are kept as objects, so that whoever holds them sees and sets the live values.
    """

    fp32_optimizer_states = False
    set_grad_none = True

    def __init__(self, params: Any, **defaults: Any) -> None:
        """Check the defaults and keep the groups.

        Args:
            params: tensors, or group dicts.
            defaults: the values of every group that does not bring its own.

        Raises:
            OptimizerError: a default is out of range.
        """
        for key in ("lr", "eps", "weight_decay"):
            if defaults.get(key, 0.0) < 0.0:
                raise OptimizerError(f"{type(self).__name__}: {key} is {defaults[key]}; it must not be negative")
        for key, values in (("betas", defaults.get("betas", ())), ("momentum", (defaults.get("momentum", 0.0),))):
            if not all(0.0 <= value < 1.0 for value in values):
                raise OptimizerError(f"{type(self).__name__}: {key} is {defaults[key]}; it must lie in [0, 1)")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            work = [p.float() if self.fp32_optimizer_states and p.dtype in LOW_PRECISION else p for p in params]
            grads = [p.grad.to(w.dtype) for p, w in zip(params, work, strict=True)]
            states = [self._state(p, w.dtype) for p, w in zip(params, work, strict=True)]
            if params:
                self.update(group, work, grads, states)
            for p, w in zip(params, work, strict=True):
                if w is not p:
                    p.copy_(w)
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by default as `set_grad_none` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _state(self, param: Tensor, dtype: torch.dtype) -> State:
        state: State = self.state[param]
        for key, value in state.items():
            # load_state_dict() casts states to the dtype of the parameter.
            if torch.is_tensor(value) and value.dtype in LOW_PRECISION and value.dtype != dtype:
                state[key] = value.to(dtype)
        return state

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Update `params` in place from `grads` of the same dtype; an empty state is that of a first step."""
        raise NotImplementedError(f"{type(self).__name__} has no update of its own")
