"""Activation checkpointing: blocks keep their inputs only and are run again in backward."""
