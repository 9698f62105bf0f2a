"""Activation checkpointing (Chen et al., 2016): blocks save only their inputs and are recomputed in backward."""
