"""Which accelerator this process uses: the one set by hand, the one DS_ACCELERATOR names, else what torch sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from deepspeed.accelerator.base import Accelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.accelerator.cuda import CudaAccelerator
from deepspeed.errors import NotAvailableError

KINDS: dict[str, Callable[[], Accelerator]] = {"cuda": CudaAccelerator, "cpu": CpuAccelerator}  # in order of preference
_chosen: dict[str, Any] = {}


def get_accelerator() -> Any:
    """The accelerator of this process; chosen at the first call, without touching the device.

    Raises:
        NotAvailableError: DS_ACCELERATOR names one that this package does not have or this machine lacks.
    """
    if "accelerator" not in _chosen:
        _chosen["accelerator"] = _choose(os.environ.get("DS_ACCELERATOR", "").strip().lower())
    return _chosen["accelerator"]


def set_accelerator(accel_obj: Any) -> None:
    """Use `accel_obj`, any object with the methods of `Accelerator`, from now on."""
    _chosen["accelerator"] = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether the accelerator in use is one of this package's own."""
    return get_accelerator().device_name() in KINDS


def _choose(asked: str) -> Accelerator:
    if not asked:
        return next(found for found in (kind() for kind in KINDS.values()) if found.is_available())
    if asked not in KINDS:
        raise NotAvailableError(f"DS_ACCELERATOR={asked!r} is not available: choose one of {list(KINDS)} or unset it.")
    accelerator = KINDS[asked]()
    if not accelerator.is_available():
        raise NotAvailableError(f"DS_ACCELERATOR={asked!r}, but torch sees no such device on this machine. Unset it.")
    return accelerator
