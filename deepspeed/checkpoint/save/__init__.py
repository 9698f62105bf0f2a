"""Saving of native checkpoints."""
