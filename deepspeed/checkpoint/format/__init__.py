"""File format and file names of native checkpoints; future versions can read them. Independent of the engine."""
