"""Utilities for all packages: logging, timers, trees of tensors. Imports no other package, and does not use ranks."""
