"""Old address of ranks by named axes."""

from __future__ import annotations

from deepspeed.pipe import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]
