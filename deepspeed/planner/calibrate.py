"""What this machine does per second, measured here in under a minute."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from deepspeed.config.sections.memory import Aio
from deepspeed.errors import StorageError
from deepspeed.simulator.machine import DTYPES, Machine
from deepspeed.storage.disk import Disk

_SIDES = (64, 256, 1024)
_BLOCKS = (1 << 18, 1 << 21, 1 << 24, 1 << 26)  # bytes
_BRIEF_S = 0.15  # of each measurement
_SHARE = 0.85  # of free memory that a plan may take; the rest is the interpreter's and the system's
INTERPRETER = 400 << 20
"""Bytes of a rank besides tensors."""
_COLLECTIVES_S = 30.0  # longest time for the ranks that measure messages


def calibrate(ranks: int, folder: str = "", memory: int = 0) -> Machine:
    """Measure this machine.

    Args:
        ranks: that will share it.
        folder: on a disk that may be used for offload; "": none.
        memory: bytes of one rank's tensors; 0: its share of what is free.
    """
    before, notes = torch.get_num_threads(), list[str]()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    try:
        matrix = {name: [[side, _matrix(dtype, side)] for side in _SIDES] for name, dtype in DTYPES.items()}
        bandwidth, overhead, fresh = _bandwidth() / ranks, _overhead(), [[float(n), _fresh(n)] for n in _BLOCKS]
    finally:
        torch.set_num_threads(before)
    collective, latency = _collectives(ranks) if ranks > 1 else (bandwidth, 0.0)
    if not collective:
        collective = bandwidth / 4
        notes.append("messages could not be measured: a quarter of the memory's bandwidth stands in their place")
    disk = _disk(folder, notes) / ranks if folder else 0.0
    free = memory or int(psutil.virtual_memory().available * _SHARE / ranks) - INTERPRETER
    where = folder if disk else ""
    return Machine(ranks, max(free, 1), matrix, bandwidth, overhead, collective, disk, where, notes, shared=True,
                   latency=latency, fresh=fresh)  # fmt: skip


def _seconds(call: Callable[[], Any]) -> float:
    """The median time of a call."""
    call()
    times, end = list[float](), time.perf_counter() + _BRIEF_S
    while len(times) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
        if len(times) >= 200 or sum(times) > 10 * _BRIEF_S:
            break
    return sorted(times)[len(times) // 2]


def _matrix(dtype: torch.dtype, side: int) -> float:
    if dtype == torch.float16:
        side = min(side, 256)  # emulated on many CPUs: a larger one takes seconds
    a, b = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
    return 2 * side**3 / _seconds(lambda: a @ b)


def _bandwidth() -> float:
    x, y = torch.zeros(1 << 23), torch.ones(1 << 23)
    return 3 * x.nbytes / _seconds(lambda: x.add_(y))


def _fresh(nbytes: int) -> float:
    """Bytes per second that the first writing of a new block costs besides; 0 where it is hardly to be seen."""
    kept = torch.zeros(nbytes, dtype=torch.uint8)
    again = _seconds(kept.zero_)
    new = _seconds(lambda: torch.empty(nbytes, dtype=torch.uint8).zero_())
    return nbytes / (new - again) if new > 1.5 * again else 0.0


def _overhead() -> float:
    x = torch.ones(8, requires_grad=True)

    def some() -> None:
        y = x
        for _ in range(20):
            y = y * 2
        y.sum().backward()

    return _seconds(some) / 60


def _collectives(ranks: int) -> tuple[float, float]:
    """Bytes per second of gathers and reductions among ranks started for it, and seconds of one of a few bytes; zeros
    where that failed."""
    with tempfile.TemporaryDirectory(prefix="ds_plan-") as folder:
        found = Path(folder, "curve.json")
        options = ["--all-reduce", "--all-gather", "--maxsize", "22", "--trials", "10", "--no-plot"]
        command = [sys.executable, "-m", "deepspeed.comm.bench", "--ranks", str(ranks), *options]
        try:
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run([*command, "--output", str(found)], timeout=_COLLECTIVES_S, check=True, **quiet)
            curves = list(json.loads(found.read_text())["curve"].values())
            slowest = min(float(rows[-1]["busbw"]) for rows in curves) * 1e9
            return slowest, max(float(rows[0]["seconds"]) for rows in curves)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError):
            return 0.0, 0.0


def _disk(folder: str, notes: list[str]) -> float:
    try:
        disk = Disk(folder, settings=Aio())
    except StorageError as error:
        notes.append(f"no plan on a disk: {error}")
        return 0.0
    with contextlib.closing(disk):
        return disk.preflight(0) * 1e6
