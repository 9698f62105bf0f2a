"""Running statistics of BatchNorm (torch's, Keras'): every rank has its own in training, all evaluate with rank 0's."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import broadcast_tensors
from deepspeed.foundation.module_tree import modules_of, running_statistics


class RunningStatistics:
    """Rank 0's running statistics on every rank, as of the last update.

    They travel with the update, so that `eval()` itself sends nothing and one rank may evaluate alone.

    Args:
        module: the model.
        axis: ranks that train it together.
    """

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self._axis = axis
        self._buffers = [
            buffer
            for child in module.modules()
            if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats and axis.size > 1
            for buffer in child.buffers(recurse=False)
        ]
        if axis.size > 1:
            self._buffers += [kept for child in modules_of(module) for kept in running_statistics(child)]
        self._first = [buffer.detach().clone() for buffer in self._buffers]  # rank 0's
        self._own: list[torch.Tensor] | None = None  # this rank's, while it evaluates

    def publish(self) -> None:
        """Send rank 0's statistics to all. All ranks call together."""
        if self._buffers:
            source = self._own or self._buffers
            for kept, now in zip(self._first, source, strict=True):
                kept.copy_(now)
            broadcast_tensors(self._axis, self._first, "running statistics of rank 0")

    def switch(self, training: bool) -> None:
        """Put this rank's own statistics (training) or rank 0's (evaluation) in place."""
        if not self._buffers or training == (self._own is None):
            return
        if training:
            wanted, self._own = self._own or [], None
        else:
            wanted, self._own = self._first, [buffer.detach().clone() for buffer in self._buffers]
        for buffer, value in zip(self._buffers, wanted, strict=True):
            buffer.copy_(value)
