"""Profiling of a model: operation counts, time by module, live memory, timelines of ranks."""
