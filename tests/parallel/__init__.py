"""Tests that need two to four gloo ranks, run in persistent workers."""
