"""File format and file names of native checkpoints, independent of the engine."""
