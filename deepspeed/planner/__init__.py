"""Prediction of a run's memory and time before it starts, and search for the best plan."""

from deepspeed.planner.memory import MemoryCount, measure_memory, predict_memory

__all__ = ["MemoryCount", "measure_memory", "predict_memory"]
