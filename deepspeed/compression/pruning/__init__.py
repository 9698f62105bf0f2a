"""Removes parameters: masks, importance scores, dependency groups, structured removal."""
