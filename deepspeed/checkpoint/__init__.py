"""Checkpoints: file names, formats, and which rank reads what. Does not drive training."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
