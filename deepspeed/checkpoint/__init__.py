"""Checkpoints: file names, formats, and the parts that each rank reads and writes. No training logic."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
