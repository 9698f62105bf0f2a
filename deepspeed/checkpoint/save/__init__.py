"""Saving of checkpoints in the native format."""
