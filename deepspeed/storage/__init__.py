"""Where a tensor rests between uses."""
