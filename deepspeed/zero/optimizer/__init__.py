"""One optimizer update over shards."""
