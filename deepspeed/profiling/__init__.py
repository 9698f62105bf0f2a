"""Profiling of a model: operation counts, and time by module."""
