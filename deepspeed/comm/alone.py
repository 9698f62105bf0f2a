"""The group of a parallel dimension that has one rank, as tensor and sequence parallelism have here."""

from __future__ import annotations

from typing import Any

from deepspeed.comm.groups import get_rank, get_world_group, new_group

_groups: dict[Any, Any] = {}  # by world group: a new world has new groups


def get_own_group() -> Any:
    """The group that holds this process alone; made without the other ranks' help."""
    world = get_world_group()
    if world not in _groups:
        _groups.clear()
        _groups[world] = new_group([get_rank()], use_local_synchronization=True)
    return _groups[world]


def get_own_rank() -> int:
    """This process's rank in its own group."""
    return 0


def get_own_world_size() -> int:
    """Number of processes in its own group."""
    return 1
