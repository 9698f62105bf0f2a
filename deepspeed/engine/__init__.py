"""The engine, and the functions that build it from its components."""
