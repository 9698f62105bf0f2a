"""Lookup and loading of native checkpoints."""
