"""Profiler of parameters, floating-point operations and time of a model, by module."""

from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
