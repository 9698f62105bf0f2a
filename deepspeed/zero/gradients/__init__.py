"""Gradient accumulation and reduce-scatter: from autograd hooks to this rank's shard of the gradient sum."""
