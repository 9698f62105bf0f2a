"""What the engine's components share: one typed object, instead of attributes that each of them declares anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.build import Axes, Components
from deepspeed.foundation.timer import SynchronizedWallClockTimer
from deepspeed.zero.accumulation import AccumulationWindow
from deepspeed.zero.state_view import StateView


@dataclass(eq=False)
class EngineState:
    """The configuration, model, parts and counters of one engine; fields have the engine's public names.

    Args:
        ds_config: resolved configuration.
        module: the model.
        device: where it computes.
        mpu: a client's model-parallel unit.
        components: groups, gradients, optimizer, window.
        basic_optimizer: the torch optimizer inside.
        timers: of forward, backward and step.
        lr_scheduler: the schedule.
        training_dataloader: the loader of `training_data`.
        global_steps: updates so far, skipped ones too.
        micro_steps: micro-batches so far.
        global_samples: samples so far, over all ranks.
        skipped_steps: updates that were skipped.
    """

    ds_config: DeepSpeedConfig
    module: nn.Module
    device: torch.device
    mpu: Any
    components: Components
    basic_optimizer: torch.optim.Optimizer | None
    timers: SynchronizedWallClockTimer
    lr_scheduler: Any = None
    training_dataloader: Any = None
    global_steps: int = 0
    micro_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    @property
    def axes(self) -> Axes:
        """Who shares what."""
        return self.components.axes

    @property
    def window(self) -> AccumulationWindow:
        """The micro-batches between two updates."""
        return self.components.window

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self.axes.world.size

    def view(self) -> StateView:
        """The training state by name."""
        parts = self.components
        return StateView(self.module, parts.groups, self.axes.world, parts.optimizer, parts.reducer)

    def forget_window(self) -> None:
        """Drop the gradients of the window and what is gathered: other values are about to come. All ranks call."""
        if self.components.optimizer is not None:
            self.components.optimizer.zero_grad()
        if self.components.lifecycle is not None:
            self.components.lifecycle.keeper.free_idle()
        self.window.restart()
