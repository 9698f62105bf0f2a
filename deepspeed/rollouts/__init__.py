"""Rollouts: answers that a model in training generates, their log-probabilities, and losses on them."""
