"""Sharded parameters: all-gather before use and resharding after it, by module hooks."""
