"""Old address of the engine of a pipeline."""

from __future__ import annotations

from deepspeed.engine.pipeline_engine import PipelineEngine
from deepspeed.errors import PipelineError

__all__ = ["PipelineEngine", "PipelineError"]
