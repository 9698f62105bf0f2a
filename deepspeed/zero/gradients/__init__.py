"""From autograd to the reduced gradient shard. Knows no optimizer."""
