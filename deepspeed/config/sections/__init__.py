"""Typed sections of the JSON, with one block or family of blocks per file."""
