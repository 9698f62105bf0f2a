"""The engine, its components and the functions that build them."""
