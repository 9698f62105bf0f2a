"""Weights as integers of 8 or 4 bits with a scale per group; activations stay in floating point."""
