"""Chooses the accelerator of this process: the one set by a call, the one named by DS_ACCELERATOR, else torch's device.

A third-party accelerator has the methods of `Accelerator` (`deepspeed.testing` tests them). It is selected by a name
that `register_accelerator` registered, or that an installed distribution lists in the entry-point group
`deepspeed.accelerators`.
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
    """The accelerator of this process; chosen at the first call, without touching the device.

    Raises:
        NotAvailableError: DS_ACCELERATOR names one that this package does not have or this machine lacks.
    """
    if "accelerator" not in _chosen:
        _chosen["accelerator"] = _choose(os.environ.get("DS_ACCELERATOR", "").strip().lower())
    return _chosen["accelerator"]


def register_accelerator(name: str, factory: Callable[[], Any]) -> None:
    """Register a third-party accelerator for DS_ACCELERATOR.

    Args:
        name: its name in DS_ACCELERATOR, in lower case.
        factory: makes an object with the methods of `Accelerator`; called when it is chosen, without arguments.

    Raises:
        ArgumentError: the name is one of this package's own, or not in lower case.
    """
    if name in KINDS or not name or name != name.strip().lower():
        raise ArgumentError(f"register_accelerator({name!r}): take a name in lower case that is not in {list(KINDS)}.")
    _registered[name] = factory


def set_accelerator(accel_obj: Any) -> None:
    """Use `accel_obj`, any object with the methods of `Accelerator`, from now on."""
    _chosen["accelerator"] = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether the accelerator in use is one of this package's own."""
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
