"""Placeholders for modules of other stages.

A stage runs the forward of the model's root module. During the run, blocks and other modules with parameters that
belong to other stages are replaced: one placeholder returns the received values, the others return NaN in the right
shape. A value that was not sent but should have been is then visible in the result as NaN, never a silent zero.
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
    """Exception that carries the output of a part's last block out of the root's forward."""

    def __init__(self, value: Any) -> None:
        super().__init__("the last block of this stage has run")
        self.value = value


class _StandIn(nn.Module):
    """Placeholder that answers attribute accesses from the module that it replaces."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, STANDS_FOR, module)  # not a child: its parameters do not belong to this stage

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__[STANDS_FOR], name)


class Elsewhere(_StandIn):
    """Placeholder for a module with parameters on another stage: returns NaN in the shape of the module's output.

    Shapes come from a copy on the meta device; the name is for error messages.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name
        self.dtype_here: torch.dtype | None = None  # dtype of floating-point results, if the model was cast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return NaN, on the device of the arguments."""
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
    """Placeholder for a block before this part: the last one returns the received values, the others return NaN."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.value: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stored value."""
        return self.value


class Final(_StandIn):
    """Last block of a part: its output goes to the next part, and the root's forward ends."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the block's output as a `Handover`."""
        raise Handover(self._stands_for(*args, **kwargs))


def poisoned(nest: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """Copy nested tensors, with NaN in floating-point ones (in `dtype`, if given) and 0 in others."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point()
        number, kind = (float("nan"), dtype or tensor.dtype) if floating else (0, tensor.dtype)
        return torch.full(tensor.shape, number, dtype=kind, device=device or tensor.device)

    return map_tensors(fill, nest)


def without_values(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if is_managed(tensor):  # moving managed parameters would gather their values
            away = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        else:
            away = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(away, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else away
    return copy.deepcopy(module, memo)
