"""One step on plain tensors: schedules, loss scale, accumulation, clipping, the update."""
