"""Twenty create-train-destroy cycles leave memory, threads and file descriptors where they were."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.tiny import adamw, start

CYCLES = 20
WIDTH = 256  # 4 blocks of 256 KiB of fp32, 20 times: an engine that stayed is seen among the libraries' pages
GROWTH = 0.01


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def settled_rss() -> int:
    """Resident bytes once freed memory has gone back to the system."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def cycle(stage: int, precision: str) -> None:
    with start(stage, Blocks(), optimizer=adamw, precision=precision, accumulation=2) as engine:
        for _ in range(4):
            engine.backward(engine(torch.ones(2, WIDTH)).float().square().mean())
            engine.step()


def cycles(stage: int, precision: str) -> list[int]:
    sizes, threads, files = [], [], []
    process = psutil.Process()
    for _ in range(CYCLES):
        cycle(stage, precision)
        sizes.append(settled_rss())
        threads.append(threading.active_count())
        files.append(process.num_fds())
    dist.barrier()
    assert threads[-1] == threads[1], threads
    assert files[-1] == files[1], files
    return sizes


TWO_RANKS = [pytest.param(stage, 2, marks=pytest.mark.slow) for stage in (0, 2)]
ONE_RANK = [pytest.param(stage, 1, marks=pytest.mark.slow) for stage in (0, 2, 3)]


@pytest.mark.parametrize(("stage", "ranks"), [*TWO_RANKS, (3, 2), *ONE_RANK])
def test_twenty_cycles_leave_memory_where_it_was(workers: Any, stage: int, ranks: int) -> None:
    for sizes in workers(ranks).run(cycles, stage, "bf16" if stage == 2 else "fp32", timeout=120):
        assert sizes[-1] <= sizes[1] * (1 + GROWTH), [size >> 10 for size in sizes]
