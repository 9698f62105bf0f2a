"""Benchmark of this machine: compute, memory, message and disk rates while all ranks run.

Ranks synchronize before each measurement, so that all of them run the same operation at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from deepspeed.config.sections.memory import Aio
from deepspeed.errors import StorageError
from deepspeed.simulator.machine import DTYPES, Machine
from deepspeed.storage.tensor_file import Disk

_SIDES = (64, 256, 1024)
_BLOCKS = (1 << 16, 1 << 18, 1 << 21, 1 << 24, 1 << 26)  # bytes
_RANDOM = 1 << 18  # elements
_LARGE = 1 << 26  # elements of all ranks together: too large for caches, as weights, gradients and states are
_BRIEF_S = 0.15  # time of each measurement
_MEET_S = 5.0  # longest wait for other ranks
_LONGEST_S = 60.0

Figures = dict[str, float]


def measured_together(ranks: int) -> Figures:
    """Run `measure` in `ranks` processes at once; returns the lowest of each rate, or {} after an error."""
    with tempfile.TemporaryDirectory(prefix="ds_plan-") as folder:
        command = [sys.executable, "-m", "deepspeed.planner.machine_benchmark", folder]
        environment = os.environ | {"OMP_NUM_THREADS": str(_threads(ranks))}
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
        started = [subprocess.Popen([*command, str(rank), str(ranks)], **quiet) for rank in range(ranks)]
        try:
            end = time.monotonic() + _LONGEST_S
            if any([process.wait(max(0.1, end - time.monotonic())) for process in started]):
                return {}
            figures = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        except (OSError, ValueError, subprocess.SubprocessError):
            return {}
        finally:
            for process in started:
                process.kill()
                process.wait()
    return {name: min(each[name] for each in figures) for name in figures[0]}


def measure(ranks: int, meet: Callable[[str], None] = lambda _name: None) -> Figures:
    """Measure the rates of this process.

    Args:
        ranks: number of ranks that share the machine.
        meet: barrier, called before each measurement with its name.

    Returns:
        rates per second: `matrix DTYPE SIDE` in floating-point operations, `bandwidth` in bytes, `fresh SIZE` in bytes
        (only the extra cost of the first write to a new block), `launches` in operators, `random` in elements.
    """
    figures: Figures = {}
    for kind, dtype in DTYPES.items():
        for side in _SIDES:
            meet(name := f"matrix {kind} {side}")
            # fp16 is emulated on many CPUs: a larger matrix takes seconds
            each = min(side, 256) if dtype == torch.float16 else side
            a, b = torch.randn(each, each).to(dtype), torch.randn(each, each).to(dtype)
            product = torch.empty_like(a)  # the cost of new memory is measured separately
            figures[name] = 2 * each**3 / _seconds(partial(torch.mm, a, b, out=product))
    meet("bandwidth")
    x, y = torch.zeros(_LARGE // ranks), torch.ones(_LARGE // ranks)
    figures["bandwidth"] = 3 * x.nbytes / _seconds(partial(x.add_, y))
    del x, y
    meet("launches")
    figures["launches"] = 60 / _seconds(partial(_launch_operators, torch.ones(8, requires_grad=True)))
    meet("random")
    x = torch.zeros(_RANDOM)
    figures["random"] = x.numel() / _seconds(partial(x.bernoulli_, 0.9))
    for nbytes in _BLOCKS:
        meet(name := f"fresh {nbytes}")
        block = torch.zeros(nbytes, dtype=torch.uint8)
        again = _seconds(block.zero_)
        new = _seconds(lambda nbytes=nbytes: torch.empty(nbytes, dtype=torch.uint8).zero_())
        # infinite if the difference is too small to measure
        figures[name] = nbytes / (new - again) if new > 1.5 * again else sys.float_info.max
        del block
    return figures


def _threads(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call."""
    call()
    times, end = list[float](), time.perf_counter() + _BRIEF_S
    while len(times) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
        if len(times) >= 200 or sum(times) > 10 * _BRIEF_S:
            break
    return sorted(times)[len(times) // 2]


def _launch_operators(y: torch.Tensor) -> None:
    """Run 60 operators with almost no work."""
    for _ in range(20):
        y = y * 2
    y.sum().backward()


def main() -> int:
    """Measure as one rank; the command line is the folder for the result, the rank and the number of ranks."""
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(_threads(ranks))

    def meet(name: str) -> None:
        (folder / f"{name}.{rank}").touch()
        end = time.monotonic() + _MEET_S
        while time.monotonic() < end and not all((folder / f"{name}.{each}").exists() for each in range(ranks)):
            time.sleep(0.0005)

    (folder / f"{rank}.json").write_text(json.dumps(measure(ranks, meet)))
    return 0


_ENDLESS = 1e18
_SHARE = 0.85  # fraction of free memory for plans; the rest is for the interpreter and the system
INTERPRETER = 400 << 20
"""Bytes of a rank's process besides tensors."""
_COLLECTIVES_S = 30.0  # time limit for the ranks that measure messages


def calibrate(ranks: int, folder: str = "", memory: int = 0) -> Machine:
    """Measure this machine for ranks that will share it; failed measurements are described in `Machine.notes`.

    Args:
        ranks: number of ranks.
        folder: folder on a disk for offload; "": no disk.
        memory: bytes of one rank's tensors; 0: its share of the free memory.
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
    disk = 0.0
    if folder:
        try:
            device = Disk(folder, settings=Aio())
        except StorageError as error:
            notes.append(f"no plan on a disk: {error}")
        else:
            with contextlib.closing(device):
                disk = device.preflight(0) * 1e6 / ranks
    free = memory or int(psutil.virtual_memory().available * _SHARE / ranks) - INTERPRETER
    where = folder if disk else ""
    return Machine(ranks, max(free, 1), matrix, bandwidth, 1 / rates["launches"], collective, disk, where, notes,
                   shared=True, latency=latency, fresh=fresh, random=rates["random"])  # fmt: skip


def _pairs(rates: Figures, kind: str) -> list[list[float]]:
    """Return [size, rate] of each measurement of a kind, by size; rate 0 means infinite."""
    pairs = [(float(name.removeprefix(kind)), rate) for name, rate in rates.items() if name.startswith(kind)]
    return [[size, rate if rate < _ENDLESS else 0.0] for size, rate in sorted(pairs)]


def _collectives(ranks: int) -> tuple[float, float]:
    """Measure collectives between `ranks` processes; returns the bus bandwidth in bytes per second and the seconds for
    a few bytes, or zeros after an error."""
    with tempfile.TemporaryDirectory(prefix="ds_plan-") as folder:
        path = Path(folder, "curve.json")
        options = ["--all-reduce", "--all-gather", "--scan", "--maxsize", "24", "--trials", "10", "--no-plot"]
        command = [sys.executable, "-m", "deepspeed.comm.bench", "--ranks", str(ranks), *options]
        try:
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run([*command, "--output", str(path)], timeout=_COLLECTIVES_S, check=True, **quiet)
            curves = list(json.loads(path.read_text())["curve"].values())
            slowest = min(float(rows[-1]["busbw"]) for rows in curves) * 1e9
            return slowest, max(float(rows[0]["seconds"]) for rows in curves)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError):
            return 0.0, 0.0


if __name__ == "__main__":
    sys.exit(main())
