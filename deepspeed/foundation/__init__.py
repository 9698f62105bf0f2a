"""Utilities for all packages: logging, timers, trees of tensors. Independent of ranks, imports no other package."""
