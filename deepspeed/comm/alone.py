"""The group of a parallel dimension that has one rank, as tensor and sequence parallelism have here."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from deepspeed.comm import watch
from deepspeed.comm.axis import make_group, require_group

_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by world group: a new world has new groups


def get_own_group() -> Any:
    """The group that holds this process alone; made without the other ranks' help."""
    require_group()
    world = dist.distributed_c10d._get_default_group()
    if world not in _groups:
        _groups[world] = make_group([dist.get_rank()], watch.timeout(), use_local_synchronization=True)
    return _groups[world]


def get_own_rank() -> int:
    """This process's rank in its own group."""
    return 0


def get_own_world_size() -> int:
    """Number of processes in its own group."""
    return 1
