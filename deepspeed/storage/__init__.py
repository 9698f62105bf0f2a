"""Storage tiers that hold tensors between uses: device, host memory, disk."""
