"""Starts real processes for a snippet that communicates, with the variables of a launcher of one's choice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pool import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "SM_", "AZ", "TORCHELASTIC")

PRELUDE = """
import os, signal, sys, time, warnings
warnings.filterwarnings("error", module="deepspeed")
import torch
torch.set_num_threads(1)
import deepspeed.comm as dist
"""


@dataclass
class Ended:
    """How one rank ended."""

    code: int
    out: str
    err: str
    seconds: float  # after the start
    begun: float  # the start on the machine's monotonic clock


def torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun and this package's launcher tell each rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def run_ranks(
    snippet: str,
    world: int = 1,
    env: Callable[[int, int, int], Mapping[str, str]] = torchrun,
    limit: float = 60.0,
    **extra: str,
) -> list[Ended]:
    """Run `snippet` on `world` ranks.

    Args:
        snippet: Python; `dist` is deepspeed.comm.
        world: number of processes.
        env: (rank, world, port) → variables; those of other launchers are taken out of the environment.
        limit: seconds after which whatever runs is killed, and ends with code -9.
        extra: variables for every rank.
    """
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    clean |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **extra}
    begun = time.monotonic()
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(snippet)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=clean | dict(env(r, world, port)), **options) for r in range(world)]
    ended: dict[int, float] = {}
    while len(ended) < world and time.monotonic() - begun < limit:
        for rank, process in enumerate(started):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic() - begun
        time.sleep(0.02)
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    texts = [process.communicate() for process in started]
    return [Ended(p.returncode, *texts[r], ended.get(r, limit), begun) for r, p in enumerate(started)]
