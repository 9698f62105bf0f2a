"""Tensor parallelism: layers, a plan for any model, and its verification."""
