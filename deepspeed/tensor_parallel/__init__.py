"""Matrices cut by columns and rows over the ranks of `tp`: layers, a plan for any model, and its proof."""
