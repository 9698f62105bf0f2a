"""Pruning: masks, importance scores, dependency groups, structured removal."""
