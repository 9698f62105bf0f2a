"""Things any room may use: logging, timers, trees of tensors. Knows no ranks, imports no room."""
