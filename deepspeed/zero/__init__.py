"""ZeRO (arXiv:1910.02054): sharding of optimizer state, gradients and parameters over data-parallel ranks."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
