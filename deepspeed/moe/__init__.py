"""Mixture of experts: layers whose experts are divided among ranks."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
