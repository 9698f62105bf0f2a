"""The engine, and the functions that build it from the other components."""
