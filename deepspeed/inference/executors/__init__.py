"""Executors: from a batch to logits. The scheduler and the KV cache do not handle tensors."""
