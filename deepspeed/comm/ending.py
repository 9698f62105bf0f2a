"""The end of the last process group, whoever brings it about: what this package keeps beside the groups goes too.

[Note: a notice in torch's table] Clients end groups with `torch.distributed.destroy_process_group`, which tells nobody.
It empties its own tables then; so an object of ours lies in one of them, and when torch drops it, it says so.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from deepspeed.comm import fetch, meet, mesh, watch
from deepspeed.comm.axis import forget_axes
from deepspeed.comm.routes import forget_routes


class _Notice:
    """Lies in a table that torch empties when the last group ends; takes the place of a group there."""


def wind_up() -> None:
    """End threads, connections and shared memory, and forget the groups; nothing happens the second time."""
    fetch.close_all()
    forget_routes()
    mesh.forget_meshes()
    forget_axes()
    watch.stop()
    meet.forget_stores()


def wind_up_with_the_groups() -> None:
    """Have `wind_up` called when the last process group of torch ends."""
    table: dict[object, list[object]] = dist.distributed_c10d._world.pg_coalesce_state  # type: ignore[assignment]
    if not any(isinstance(one, _Notice) for one in table):
        notice = _Notice()
        weakref.finalize(notice, wind_up).atexit = False
        table[notice] = []
