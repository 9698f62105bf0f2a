"""Storage tiers of tensors between uses."""
