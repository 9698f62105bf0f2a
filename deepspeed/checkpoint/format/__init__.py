"""Bytes and names of the native format, which stay readable. Independent of the engine."""
