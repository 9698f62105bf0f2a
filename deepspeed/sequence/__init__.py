"""Sequences cut over ranks: attention by heads, batches and losses over the cut, long sequences tile by tile."""
