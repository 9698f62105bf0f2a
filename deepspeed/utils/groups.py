"""Old address of the groups by parallel dimension: what the mesh of the newest engine answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.comm.mesh import UNITS, current_mesh


def __getattr__(name: str) -> Callable[[], Any]:
    public = name.removeprefix("_")
    if any(public == f"get_{unit}_{what}" for unit in UNITS for what in ("group", "rank", "world_size")):
        return lambda: getattr(current_mesh(), public)()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
