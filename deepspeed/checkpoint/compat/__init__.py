"""Readers and writers for checkpoint formats of other libraries."""
