"""Releases the resources of the process groups when the last one is destroyed.

[Note: a notice in torch's table] Clients destroy groups with `torch.distributed.destroy_process_group`, which has no
callback. It empties its own tables, so one of our objects is put into such a table; its finalizer is the callback.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import torch.distributed as dist

Release = TypeVar("Release", bound=Callable[[], None])


class Phase(IntEnum):
    """The order in which what belongs to the process groups is released."""

    CONNECTIONS = 0
    ROUTES = 1
    MESHES = 2
    AXES = 3
    WATCH = 4
    STORES = 5


_releases: dict[Phase, Callable[[], None]] = {}


class _Notice:
    """Lies in a table that torch empties when the last group ends; takes the place of a group there."""


def released_in(phase: Phase) -> Callable[[Release], Release]:
    """Decorator: each shutdown of process groups calls the function in a phase; a phase has one function."""

    def register(release: Release) -> Release:
        _releases[phase] = release
        return release

    return register


def wind_up() -> None:
    """End threads, connections and shared memory, and forget the groups; nothing happens the second time."""
    for phase in sorted(_releases):
        _releases[phase]()


def wind_up_with_the_groups() -> None:
    """Have `wind_up` called when the last process group of torch ends."""
    table: dict[object, list[object]] = dist.distributed_c10d._world.pg_coalesce_state  # type: ignore[assignment]
    if not any(isinstance(entry, _Notice) for entry in table):
        notice = _Notice()
        weakref.finalize(notice, wind_up).atexit = False
        table[notice] = []
