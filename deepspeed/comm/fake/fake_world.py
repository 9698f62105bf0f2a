"""A world of fake ranks: this process is one of them, the others do not exist."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives import scalars
from deepspeed.comm.process_groups.process_group import destroy_process_group
from deepspeed.errors import UsageError
from deepspeed.foundation.fake_mode import simulation


class _Supplied(scalars.FakeScalars):
    """Numbers that decide, where tensors are the CPU's and hold nothing."""

    device = torch.device("cpu")


@contextlib.contextmanager
def simulated_world(
    rank: int,
    size: int,
    *,
    late: bool = False,
    device: bool = False,
    per_host: int = 0,
    stage_outputs: dict[int, Any] | None = None,
) -> Generator[None]:
    """Inside, this process simulates one rank.

    Args:
        rank: which.
        size: ranks of the world.
        late: the others answer only when they are waited for; else at once.
        device: the CPU's tensors stand for those of a device.
        per_host: ranks on each host; 0: `LOCAL_WORLD_SIZE` says it, or all are on one.
        stage_outputs: what stages of a pipeline that were run before hand on; is added to.

    Raises:
        UsageError: this process has a process group.
    """
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group, and a simulation makes a world of its own: predict before "
            "deepspeed.init_distributed(), or in another process"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # 0.1 s, for simulations alone

    before = scalars.current
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    scalars.current = _Supplied()
    try:
        with simulation(late=late, device=device, per_host=per_host, outputs=stage_outputs):
            yield
    finally:
        scalars.current = before
        destroy_process_group()
