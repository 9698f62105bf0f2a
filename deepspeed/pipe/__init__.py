"""Pipeline parallelism: models split into stages, schedules as lists of actions, and one executor for all schedules."""

from __future__ import annotations

from deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
]
