"""Support for client libraries: models with a previous engine, divided losses, and BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import ArgumentError
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.module_tree import modules_of, running_statistics
from deepspeed.foundation.transformers_model import is_instance_of
from deepspeed.zero.parameters.module_hooks import Hook

_CLOSE = "_ds_close"


def close_previous_engine(model: nn.Module) -> None:
    """Close the previous engine of `model`, if any; Lightning's Trainer creates a new one to validate after fitting."""
    before: Any = vars(model).get(_CLOSE)
    if before is not None:
        log_rank0(f"{type(model).__name__} gets a new engine: the one it had is closed")
        before()


def register_engine(model: nn.Module, close: Callable[[], None] | None) -> None:
    """Register the function that closes the engine of `model`; None: remove it, since the engine is closed."""
    if close is None:
        vars(model).pop(_CLOSE, None)
    else:
        vars(model)[_CLOSE] = Hook(close)


def tell_dtypes(model: nn.Module, dtypes: Mapping[Parameter, torch.dtype]) -> None:
    """Update the `dtype` attribute of Lightning modules after a cast; `dtypes`: new dtype of each cast parameter."""
    for module in model.modules():
        if is_instance_of(module, "_DeviceDtypeModuleMixin"):
            dtype = next((dtypes[param] for param in module.parameters() if param in dtypes), None)
            if dtype is not None:
                vars(module)["_dtype"] = dtype


def loss_is_divided(model: nn.Module) -> bool:
    """Return whether losses of `model` are already divided by the accumulation steps, as by Lightning's Trainer."""
    return (
        is_instance_of(model, "LightningModule")
        and getattr(model, "_trainer", None) is not None
        and bool(model.automatic_optimization)
    )


def check_loss(loss: Any) -> None:
    """Raise ArgumentError unless `loss` is a tensor of one element with an autograd graph."""
    if not isinstance(loss, torch.Tensor):
        raise ArgumentError(
            f"backward needs the loss as a tensor, got {type(loss).__name__}; models that return several values: "
            f"pick the loss out first"
        )
    if loss.numel() != 1:
        raise ArgumentError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}; take .mean() or .sum()")
    if not loss.requires_grad:
        raise ArgumentError(
            "the loss has no graph: it was detached, computed under no_grad, or no parameter that requires grad "
            "took part in it"
        )


class RunningStatistics:
    """Copies of rank 0's running statistics (BatchNorm) for evaluation, and this rank's own for training.

    The copies are updated by `publish` after each update, so that `eval()` does not communicate.

    Args:
        axis: ranks with the same model slice.

    Attributes:
        buffers: buffers of the model that are running statistics; empty with one data-parallel rank.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self._axis = axis
        self.buffers = [
            buffer
            for child in module.modules()
            if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats and axis.size > 1
            for buffer in child.buffers(recurse=False)
        ]
        if axis.size > 1:
            self.buffers += [statistic for child in modules_of(module) for statistic in running_statistics(child)]
        self._first = [buffer.detach().clone() for buffer in self.buffers]  # rank 0's statistics
        self._own: list[torch.Tensor] | None = None  # this rank's statistics, during evaluation

    def publish(self) -> None:
        """Broadcast rank 0's current statistics. All ranks must call this."""
        source = self._own or self.buffers
        for initial, now in zip(self._first, source, strict=True):
            initial.copy_(now)
        broadcast_tensors(self._axis, self._first, "running statistics of rank 0")

    def switch(self, training: bool) -> None:
        """Set the model's buffers to this rank's own statistics (`training`) or to rank 0's."""
        if not self.buffers or training == (self._own is None):
            return
        if training:
            wanted, self._own = self._own or [], None
        else:
            wanted, self._own = self._first, [buffer.detach().clone() for buffer in self.buffers]
        for buffer, value in zip(self.buffers, wanted, strict=True):
            buffer.copy_(value)
