"""Reads and writes formats of other libraries."""
