"""Old address of the counts of gathers."""

from __future__ import annotations

from deepspeed.zero.parameters.all_gather_stats import PartitionedParameterProfiler

__all__ = ["PartitionedParameterProfiler"]
