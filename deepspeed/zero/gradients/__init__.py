"""From autograd to the reduced gradient shard. Independent of the optimizer."""
