"""Sequence parallelism: attention by heads, batches and losses over split sequences, tiled computation."""
