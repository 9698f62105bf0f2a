"""What this machine does per second, measured here in under a minute."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from deepspeed.config.sections.memory import Aio
from deepspeed.errors import StorageError
from deepspeed.planner.rates import Figures, measure, measured_together
from deepspeed.simulator.machine import DTYPES, Machine
from deepspeed.storage.disk import Disk

_ENDLESS = 1e18
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
    notes = list[str]()
    rates = measured_together(ranks)
    if not rates:
        notes.append("ranks could not be measured at once: figures are those of one alone, and too high")
        rates = measure(ranks)
    matrix = {name: _pairs(rates, f"matrix {name} ") for name in DTYPES}
    bandwidth, fresh = rates["bandwidth"], _pairs(rates, "fresh ")
    collective, latency = _collectives(ranks) if ranks > 1 else (bandwidth, 0.0)
    if not collective:
        collective = bandwidth / 4
        notes.append("messages could not be measured: a quarter of the memory's bandwidth stands in their place")
    disk = _disk(folder, notes) / ranks if folder else 0.0
    free = memory or int(psutil.virtual_memory().available * _SHARE / ranks) - INTERPRETER
    where = folder if disk else ""
    return Machine(ranks, max(free, 1), matrix, bandwidth, 1 / rates["launches"], collective, disk, where, notes,
                   shared=True, latency=latency, fresh=fresh, random=rates["random"])  # fmt: skip


def _pairs(rates: Figures, kind: str) -> list[list[float]]:
    """Those figures of a kind, by size; 0 where a rate is endless."""
    found = [(float(name.removeprefix(kind)), rate) for name, rate in rates.items() if name.startswith(kind)]
    return [[size, rate if rate < _ENDLESS else 0.0] for size, rate in sorted(found)]


def _collectives(ranks: int) -> tuple[float, float]:
    """Bytes per second of gathers and reductions among ranks started for it, and seconds of one of a few bytes; zeros
    where that failed."""
    with tempfile.TemporaryDirectory(prefix="ds_plan-") as folder:
        found = Path(folder, "curve.json")
        options = ["--all-reduce", "--all-gather", "--scan", "--maxsize", "24", "--trials", "10", "--no-plot"]
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
