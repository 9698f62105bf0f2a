"""Executors compute logits for a batch. Scheduler and block pool do not handle tensors."""
