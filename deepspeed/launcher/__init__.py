"""The `deepspeed` command: starts the ranks of a run and ends them together; imports neither torch nor the engine."""
