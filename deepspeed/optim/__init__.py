"""Optimizer step on plain tensors: schedules, loss scale, accumulation, clipping, update."""
