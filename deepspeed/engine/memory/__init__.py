"""Turns bytes into reports and advice; the only place that does."""
