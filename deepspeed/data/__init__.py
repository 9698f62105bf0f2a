"""What feeds a run: indexed token files, packing, batches of equal tokens, difficulty by step."""
