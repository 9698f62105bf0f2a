"""Utilities for all packages, such as logging, timers and trees of tensors."""
