"""Generation: any causal language model, batched on pages of one cache, equal to its own `generate`."""
