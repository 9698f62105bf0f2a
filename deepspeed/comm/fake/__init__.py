"""Stands for the absent ranks of a fake world."""
