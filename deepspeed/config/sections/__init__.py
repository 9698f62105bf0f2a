"""The typed sections of the JSON, one block or family of blocks per file."""
