"""ZeRO: sharding of parameters, gradients and optimizer state."""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
