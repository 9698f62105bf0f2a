"""Mixture of experts: layers whose experts are divided among ranks."""
