"""Tensor parallelism: sliced layers, a sharding plan for any model, and its verification."""
