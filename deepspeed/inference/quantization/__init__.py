"""Weight-only quantization to 8 or 4 bits, with a scale per group, and a lossless 12-bit form of bf16."""
