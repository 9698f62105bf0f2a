"""File format and file names of native checkpoints."""
