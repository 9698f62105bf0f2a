"""Smaller models: prune, quantize, distil."""
