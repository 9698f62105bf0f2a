"""Weight-only quantization to 8 or 4 bits, with a scale per group; activations stay in floating point."""
