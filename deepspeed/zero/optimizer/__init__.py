"""ZeRO optimizer: one optimizer update over the shards of all ranks."""
