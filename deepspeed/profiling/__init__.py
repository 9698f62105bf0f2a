"""What a model computes: operation counts, and time by module."""
