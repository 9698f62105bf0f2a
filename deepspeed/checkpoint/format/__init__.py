"""Bytes and names of the native format, stable for ever. Knows no engine."""
