"""Sequence parallelism (DeepSpeed-Ulysses): attention, batches and losses of split sequences, tiled computation."""
