"""A step's recording replayed on a machine: what overlaps, what is exposed, what the host limits."""
