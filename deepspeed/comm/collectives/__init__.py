"""Collectives and point-to-point messages."""
