"""The `deepspeed` command: starts the ranks of a job and ends them together; imports neither torch nor the engine."""
