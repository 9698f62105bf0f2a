"""Predicts memory and time of a run before it starts, and searches for the best plan."""

from deepspeed.planner.memory import MemoryCount, measure_memory, predict_memory

__all__ = ["MemoryCount", "measure_memory", "predict_memory"]
