"""Smaller models: pruning, layer reduction, distillation and quantization in sharded training, and export.

The user guide is `docs/compression.md`. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "init_compression": "compress",
    "redundancy_clean": "compress",
    "student_initialization": "compress",
    "compression_scheduler": "scheduler",
    "convert_conv1d_to_linear": "helper",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"deepspeed.compression.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'deepspeed.compression' has no attribute {name!r}")
