"""Moves and merges the files of the package by `map.tsv`; goes when the moves are done."""
