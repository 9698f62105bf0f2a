"""Sharded checkpoints: file format, saving, loading on any topology, and compatibility with upstream's layout."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
