"""Before a run: what it will take, whether it fits, which plan is best."""

from deepspeed.planner.memory import MemoryCount, measure_memory, predict_memory

__all__ = ["MemoryCount", "measure_memory", "predict_memory"]
