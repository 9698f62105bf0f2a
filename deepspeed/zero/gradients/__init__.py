"""Gradients from autograd to the reduced shard. Independent of the optimizer."""
