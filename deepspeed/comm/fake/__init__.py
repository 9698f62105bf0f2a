"""Simulates the absent ranks of a fake world."""
