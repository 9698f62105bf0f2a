"""Configuration block `flops_profiler`."""

from __future__ import annotations

from deepspeed.config.sections.monitor import FlopsProfilerConfig as DeepSpeedFlopsProfilerConfig

__all__ = ["DeepSpeedFlopsProfilerConfig"]
