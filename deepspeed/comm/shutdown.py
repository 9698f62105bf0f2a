"""Release of the process groups' resources when the groups are destroyed.

[Note: a notice in torch's table] Clients destroy groups with `torch.distributed.destroy_process_group`, which has no
callback. But it empties torch's tables, so this package puts an object with a finalizer into one of the tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import torch.distributed as dist

Release = TypeVar("Release", bound=Callable[[], None])


class Phase(IntEnum):
    """Phases of a shutdown, in order: each releases one kind of resource of the process groups."""

    PEERS = 0
    CONNECTIONS = 1
    ROUTES = 2
    MESHES = 3
    AXES = 4
    WATCH = 5
    STORES = 6


_releases: dict[Phase, Callable[[], None]] = {}


class _Notice:
    """Entry in a table that torch clears when all groups are destroyed; the entry's finalizer calls `wind_up`."""


def released_in(phase: Phase) -> Callable[[Release], Release]:
    """Create a decorator that registers the function to call in `phase` of each shutdown; one per phase."""

    def register(release: Release) -> Release:
        _releases[phase] = release
        return release

    return register


def wind_up() -> None:
    """Release the resources of the process groups in the order of `Phase`; a second call finds nothing to release."""
    for phase in sorted(_releases):
        _releases[phase]()


def wind_up_with_the_groups() -> None:
    """Arrange that `wind_up` is called when torch destroys all process groups."""
    table: dict[object, list[object]] = dist.distributed_c10d._world.pg_coalesce_state  # type: ignore[assignment]
    if not any(isinstance(entry, _Notice) for entry in table):
        notice = _Notice()
        weakref.finalize(notice, wind_up).atexit = False
        table[notice] = []
