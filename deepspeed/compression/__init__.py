"""Model compression: pruning, layer reduction, distillation and quantization in sharded training, and export.

The user guide is `docs/compression.md`. Names are imported on first use.
"""

from __future__ import annotations

from deepspeed.foundation.addresses import serve

__getattr__, __all__ = serve(__name__)
