"""Old address of the counts of gathers."""

from __future__ import annotations

from deepspeed.zero.gather_profile import PartitionedParameterProfiler

__all__ = ["PartitionedParameterProfiler"]
