"""Choice of the accelerator: `set_accelerator`, else DS_ACCELERATOR, else the device that torch detects.

A third-party accelerator implements the methods of `Accelerator` (`deepspeed.testing` tests them). It is registered by
`register_accelerator`, or by an installed distribution in the entry-point group `deepspeed.accelerators`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from deepspeed.accelerator.base import Accelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.accelerator.cuda import CudaAccelerator
from deepspeed.errors import ArgumentError, NotAvailableError

KINDS: dict[str, Callable[[], Accelerator]] = {"cuda": CudaAccelerator, "cpu": CpuAccelerator}  # in order of preference
ENTRY_POINTS = "deepspeed.accelerators"
_registered: dict[str, Callable[[], Any]] = {}
_chosen: dict[str, Any] = {}


def get_accelerator() -> Any:
    """Return the accelerator of this process. The first call selects it, without initializing the device.

    Raises:
        NotAvailableError: DS_ACCELERATOR names an accelerator that this package or this machine does not have.
    """
    if "accelerator" not in _chosen:
        _chosen["accelerator"] = _choose(os.environ.get("DS_ACCELERATOR", "").strip().lower())
    return _chosen["accelerator"]


def register_accelerator(name: str, factory: Callable[[], Any]) -> None:
    """Register a third-party accelerator for DS_ACCELERATOR.

    Args:
        name: value of DS_ACCELERATOR that selects the accelerator, in lower case.
        factory: function without arguments that creates an object with the methods of `Accelerator`.

    Raises:
        ArgumentError: the name belongs to a built-in accelerator, is empty, or is not in lower case.
    """
    if name in KINDS or not name or name != name.strip().lower():
        raise ArgumentError(f"register_accelerator({name!r}): take a name in lower case that is not in {list(KINDS)}.")
    _registered[name] = factory


def set_accelerator(accel_obj: Any) -> None:
    """Use `accel_obj`, any object with the methods of `Accelerator`, as this process's accelerator."""
    _chosen["accelerator"] = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return whether the accelerator in use is built into this package."""
    return get_accelerator().device_name() in KINDS


def _choose(name: str) -> Accelerator:
    if not name:
        return next(accelerator for accelerator in (kind() for kind in KINDS.values()) if accelerator.is_available())
    installed = {entry.name.lower(): entry for entry in entry_points(group=ENTRY_POINTS)}
    known = [*KINDS, *(other for other in {**installed, **_registered} if other not in KINDS)]
    if name not in known:
        raise NotAvailableError(f"DS_ACCELERATOR={name!r} is not available: choose one of {known} or unset it.")
    factory = KINDS.get(name) or _registered.get(name) or installed[name].load()
    accelerator = factory()
    if not accelerator.is_available():
        raise NotAvailableError(f"DS_ACCELERATOR={name!r}, but torch sees no such device on this machine. Unset it.")
    return accelerator
