"""Prediction of a run's memory and step time before it starts, and search for the fastest configuration."""

from deepspeed.planner.memory import MemoryCount, measure_memory, predict_memory

__all__ = ["MemoryCount", "measure_memory", "predict_memory"]
