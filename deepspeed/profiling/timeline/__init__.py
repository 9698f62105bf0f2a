"""Timeline of the ranks, recorded by `engine/timeline.py`: time by category, a Chrome trace and a picture."""

from deepspeed.profiling.timeline.modules import ModuleSpans
from deepspeed.profiling.timeline.segments import RankRecord
from deepspeed.profiling.timeline.timeline import Limit, Timeline

__all__ = ["Limit", "ModuleSpans", "RankRecord", "Timeline"]
