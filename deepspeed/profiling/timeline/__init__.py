"""Timeline of the ranks, recorded by `engine/timeline.py`: spans as shares of the step, a trace and a picture."""

from deepspeed.profiling.timeline.modules import ModuleSpans
from deepspeed.profiling.timeline.segments import RankRecord
from deepspeed.profiling.timeline.timeline import Limit, Timeline

__all__ = ["Limit", "ModuleSpans", "RankRecord", "Timeline"]
