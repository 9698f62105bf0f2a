"""State of an engine that its components share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.ranks import Ranks
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import DATA
from deepspeed.compression.controller import Compression
from deepspeed.compression.pruning.structured_removal import Removal
from deepspeed.config import DeepSpeedConfig
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.data.layer_drop import LayerDropSchedule
from deepspeed.data.random_ltd import RandomLTDScheduler
from deepspeed.engine.build import Components
from deepspeed.foundation.timer import HostWallClockTimer
from deepspeed.zero.api.state_view import StateView
from deepspeed.zero.gradients.accumulation import AccumulationWindow
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.parameters.parallel_groups import ParallelGroups


@dataclass(eq=False)
class EngineHooks:
    """Callbacks that optional features register, called in order of registration."""

    stepped: list[Callable[[], None]] = field(default_factory=list)  # after the optimizer's step, timed as part of it
    # after an update that was not skipped, and after the scheduler's step
    applied: list[Callable[[], None]] = field(default_factory=list)
    ended: list[Callable[[], None]] = field(default_factory=list)  # at the end of a step; a hook may remove itself
    # at every save and load, with the folder, and at a save with the client's state
    checkpointed: list[Callable[[str, dict[str, Any] | None], None]] = field(default_factory=list)
    # with the compression state of an opened checkpoint, before the checkpoint is compared with the model
    opened: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)


@dataclass(eq=False)
class EngineState:
    """Configuration, model, components and counters of one engine; fields have the engine's public names.

    Args:
        mpu: the client's model-parallel unit, or None.
        basic_optimizer: the inner optimizer, without ZeRO; None without an optimizer.
        global_steps: updates so far, including skipped ones.
        micro_steps: micro-batches so far.
        global_samples: samples so far, over all ranks.
        skipped_steps: skipped updates so far.
        compression: compression of the model, or None.
        removals: units removed from the model, in order; checkpoints contain only the remaining ones.
        curriculum: schedule of the block `curriculum_learning`, or None.
        layer_drop: schedule of `progressive_layer_drop`, or None.
        random_ltd: schedule of random-LTD, or None.
    """

    ds_config: DeepSpeedConfig
    module: nn.Module
    device: torch.device
    mpu: Any
    components: Components
    basic_optimizer: torch.optim.Optimizer | None
    timers: HostWallClockTimer
    lr_scheduler: Any = None
    training_dataloader: Any = None
    global_steps: int = 0
    micro_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    compression: Compression | None = None
    hooks: EngineHooks = field(default_factory=EngineHooks)
    removals: list[Removal] = field(default_factory=list)
    curriculum: CurriculumScheduler | None = None
    layer_drop: LayerDropSchedule | None = None
    random_ltd: RandomLTDScheduler | None = None

    @property
    def axes(self) -> ParallelGroups:
        """Return the axes of the mesh over which the engine communicates."""
        return self.components.axes

    @property
    def window(self) -> AccumulationWindow:
        """Return the accumulation window: the micro-batches between two updates."""
        return self.components.window

    @property
    def everyone(self) -> Axis:
        """Return the axis of all ranks of the engine, including those with other model slices."""
        return self.axes.everyone

    @property
    def sliced(self) -> bool:
        """Return whether ranks have different model slices."""
        return not self.axes.mesh.is_data_parallel or bool(self.components.ep_sizes)

    def is_first_with(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank is the first of the ranks that have the same slice of a parameter."""
        ep, mesh = placement_of(tensor).ep, self.axes.mesh
        return (self.axes.dp_sp_group if ep == 1 else mesh.axis("dp_replicate", "edp", ep=ep)).rank == 0

    @property
    def model_dims(self) -> dict[str, int]:
        """Return the sizes of the mesh dims pp, sp and tp; dims of size 1 are omitted."""
        return {dim: size for dim, size in self.axes.mesh.sizes.items() if dim not in DATA and size > 1}

    def view(self) -> StateView:
        """Create a view of the training state by parameter name."""
        parts, coordinates = self.components, self.axes.mesh.coordinates
        return StateView(self.module, parts.groups, self.axes.dp_sp_group, parts.optimizer, parts.reducer, coordinates)

    def names_elsewhere(self, view: StateView) -> set[str]:
        """Return the names of parameters, buffers and aliases on any rank; empty if slices are equal. Collective."""
        if not self.sliced:
            return set()
        first = self.axes.dp_sp_group.rank == 0 or self.components.ep_sizes  # names of experts may differ between ranks
        local_names = [*view.members, *view.plain, *view.buffers, *view.aliases] if first else []
        return {name for names in Ranks(self.everyone).gather(local_names) for name in names}

    def forget_window(self) -> None:
        """Drop the gradients of the accumulation window, and free gathered parameters. All ranks must call this."""
        if self.components.optimizer is not None:
            self.components.optimizer.zero_grad()
        if self.components.lifecycle is not None:
            self.components.lifecycle.prefetcher.free_idle()
        self.window.restart()
