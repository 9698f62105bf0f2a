"""Executors, which compute the logits of a ragged batch: native, paged, gathered, or the model's own `generate`."""
