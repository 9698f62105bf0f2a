"""Finds and loads checkpoints of the native format."""
