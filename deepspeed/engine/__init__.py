"""Puts the components together: the engine users hold, and what builds it."""
