"""Sequence parallelism: attention over split sequences, their batches and losses, and tiled computation."""
