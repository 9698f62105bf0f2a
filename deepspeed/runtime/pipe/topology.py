"""Old address of ranks by named axes."""

from __future__ import annotations

from deepspeed.pipe import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from deepspeed.pipe.topology import PipelineParallelGrid

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
