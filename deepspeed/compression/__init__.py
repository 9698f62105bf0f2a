"""Model compression: pruning, layer reduction, distillation and quantization in sharded training, and export.

The user guide is `docs/compression.md`.
"""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
