"""Parts of the optimizer step: optimizers, learning-rate schedules, loss scale, gradient norms, compute dtypes."""
