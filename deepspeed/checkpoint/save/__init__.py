"""Saves checkpoints, in the native format."""
