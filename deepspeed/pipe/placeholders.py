"""Placeholders for modules of other stages.

A stage runs the forward of the model's root module. During the run, placeholders replace the modules of other stages:
one returns the received values, the others return NaN in the right shape. If a value should have been sent but was not,
the result is therefore NaN instead of silently wrong.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from deepspeed.errors import PipelineError
from deepspeed.foundation.pytree import map_tensors
from deepspeed.zero.layout.units import STANDS_FOR
from deepspeed.zero.parameters.parameter import is_managed

Slot = tuple[nn.Module, str]  # parent module, and name of the replaced child


class Handover(Exception):  # noqa: N818  no error: it ends the root's forward where the next part begins
    """Control-flow exception that ends the root's forward after a part's last block; `value` is the block's output."""

    def __init__(self, value: Any) -> None:
        super().__init__("the last block of this stage has run")
        self.value = value


class _StandIn(nn.Module):
    """Placeholder with the attributes of the module that it replaces."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, STANDS_FOR, module)  # not a child: its parameters do not belong to this stage

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__[STANDS_FOR], name)


class Elsewhere(_StandIn):
    """Placeholder for a module of another stage: returns NaN in the shape of the module's output.

    Args:
        module: a copy of the module on the meta device, which computes the shapes.
        name: name of the module in error messages.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name
        self.dtype_here: torch.dtype | None = None  # dtype of floating-point results, if the model was cast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return NaN (integers: 0) in the shape of the module's output, on the device of the arguments.

        Raises:
            PipelineError: the module cannot compute its shapes on the meta device.
        """
        devices: list[torch.device] = []

        def away(tensor: torch.Tensor) -> torch.Tensor:
            devices.append(tensor.device)
            return tensor.detach().to("meta")

        args, kwargs = map_tensors(away, (args, kwargs))
        try:
            with torch.no_grad():
                outputs = self._stands_for(*args, **kwargs)
        except RuntimeError as error:
            raise PipelineError(f"'{self.name}' lives on another stage, and its shape is unknown: {error}") from error
        return poisoned(outputs, devices[0] if devices else torch.device("cpu"), self.dtype_here)


class Skipped(_StandIn):
    """Placeholder for a block of an earlier part: returns its attribute `value`.

    For the last of these blocks it is the value received from the previous part, for the others NaN.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.value: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return `value`."""
        return self.value


class Final(_StandIn):
    """Wrapper of the last block of a part: ends the root's forward with the block's output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, and raise its output as a `Handover`."""
        raise Handover(self._stands_for(*args, **kwargs))


def poisoned(nest: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return nested tensors of the same shapes, with NaN in floating-point ones and 0 in others.

    None for `device` and `dtype` (of floating-point ones) keeps those of each tensor.
    """

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point()
        number, kind = (float("nan"), dtype or tensor.dtype) if floating else (0, tensor.dtype)
        return torch.full(tensor.shape, number, dtype=kind, device=device or tensor.device)

    return map_tensors(fill, nest)


def without_values(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, also one with sharded parameters."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if is_managed(tensor):  # moving managed parameters would gather their values
            away = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        else:
            away = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(away, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else away
    return copy.deepcopy(module, memo)
