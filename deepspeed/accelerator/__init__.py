"""Device abstraction: devices, streams, memory and RNG state. Only this package uses torch.cuda."""

from __future__ import annotations

from deepspeed.accelerator.base import Accelerator
from deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    register_accelerator,
    set_accelerator,
)

__all__ = [
    "Accelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "register_accelerator",
    "set_accelerator",
]
