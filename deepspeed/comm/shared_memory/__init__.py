"""Messages through shared memory between the ranks of one machine."""
