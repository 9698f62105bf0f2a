"""Base class of the optimizers in `deepspeed.ops`, which update all tensors of a parameter group in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import OptimizerError

State = dict[str, Any]


class GroupOptimizer(torch.optim.Optimizer):
    """Base class of optimizers; a subclass implements `update` for the tensors of one group.

    `param_groups` has the caller's own group dicts, so the caller can read and set current hyperparameters in them.
    """

    set_grad_none = True

    def __init__(self, params: Any, **defaults: Any) -> None:
        """Check the defaults and create the groups.

        Args:
            params: tensors, or group dicts.
            defaults: default hyperparameters of the groups, such as `lr`.

        Raises:
            OptimizerError: a hyperparameter is out of range.
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
        """Update every parameter with a gradient.

        Args:
            closure: evaluates the model again and returns the loss; None: not called.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: State) -> None:
        """Update the parameters of one group that have gradients."""
        params = [p for p in group["params"] if p.grad is not None]
        if params:
            grads = [p.grad.to(p.dtype) for p in params]
            self.update(group, params, grads, [self.state[p] for p in params])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; the default of `set_to_none` is `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Update `params` in place from `grads` of the same dtype; `states` are empty dicts before the first step."""
        raise NotImplementedError(f"{type(self).__name__} has no update of its own")
