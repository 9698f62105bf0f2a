"""Puts the pieces together: the engine users hold, and what builds it."""
