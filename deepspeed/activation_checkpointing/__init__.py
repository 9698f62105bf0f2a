"""Activation checkpointing: blocks save only their inputs and are recomputed in backward."""
