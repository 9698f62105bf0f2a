"""The base class of our optimizers: the tensors of each parameter group are passed to one method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import OptimizerError

State = dict[str, Any]


class GroupOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose subclass updates the tensors of one group at a time.

    Given group dicts are kept as objects, so that whoever holds them sees and sets the live values.
    """

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
            self.step_group(group)
        return loss

    def step_group(self, group: State) -> None:
        """Update the parameters of one group that have a gradient."""
        params = [p for p in group["params"] if p.grad is not None]
        if params:
            grads = [p.grad.to(p.dtype) for p in params]
            self.update(group, params, grads, [self.state[p] for p in params])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by default as `set_grad_none` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def update(self, group: State, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Update `params` in place from `grads` of the same dtype; an empty state is that of a first step."""
        raise NotImplementedError(f"{type(self).__name__} has no update of its own")
