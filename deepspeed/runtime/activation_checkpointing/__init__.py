"""Old address of activation checkpointing."""

from __future__ import annotations

from deepspeed.runtime.activation_checkpointing import checkpointing, config

__all__ = ["checkpointing", "config"]
