"""Benchmark of collectives by message size, `ds_bench`; writes tables, a file for the comms logger and a plot.

Without a launcher, the command starts one rank on each device of the machine (two ranks on a CPU).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.watchdog.comms_logger import calc_bw_log, convert_size, trimmed_mean
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.foundation.spans import now

OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "pt2pt", "broadcast", "reduce_scatter")
_FORMULA = {
    "all_gather": "all_gather_into_tensor", "all_to_all": "all_to_all_single", "pt2pt": "send",
    "reduce_scatter": "reduce_scatter_tensor",
}  # fmt: skip
_SMALLEST = 10  # power of two, in bytes


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="ds_bench", description=__doc__)
    for operation in OPERATIONS:
        arguments.add_argument(f"--{operation.replace('_', '-')}", action="store_true", help="measure it; none: all")
    arguments.add_argument("--scan", action="store_true", help="all sizes up to --maxsize; else that size alone")
    arguments.add_argument("--maxsize", type=int, default=24, help="largest message: 2^N bytes")
    arguments.add_argument("--trials", type=int, default=50, help="calls that are measured")
    arguments.add_argument("--warmups", type=int, default=5, help="calls before")
    arguments.add_argument("--mem-factor", type=float, default=0.3, help="largest share of free memory for one message")
    arguments.add_argument("--dtype", default="float32", help="of the elements, as torch names it")
    arguments.add_argument(
        "--bw-unit", choices=["Gbps", "GBps"], default="Gbps", help="gigabits or gigabytes per second"
    )
    arguments.add_argument("--backend", default=None, help="of the process group")
    arguments.add_argument("--dist", choices=["deepspeed", "torch"], default="deepspeed", help="whose collectives")
    arguments.add_argument("--device", default=None, help="accepted for old scripts; the accelerator decides")
    arguments.add_argument("--async-op", action="store_true", help="start all calls, then wait for all")
    arguments.add_argument("--raw", action="store_true", help="figures without units")
    arguments.add_argument("--debug", action="store_true", help="check the results")
    arguments.add_argument("--local_rank", type=int, default=0, help="accepted for launchers")
    arguments.add_argument("--ranks", type=int, default=0, help="ranks to start; 0: every device, two on a CPU")
    arguments.add_argument("--output", default="ds_bench.json", help="file for the curve; its picture lies beside it")
    arguments.add_argument("--no-plot", action="store_true", help="no picture")
    return arguments


def main() -> int:
    """Run the command line in `sys.argv`; returns 0, or the exit code of the launcher that is started without RANK."""
    arguments = parser().parse_args()
    if "RANK" not in os.environ:
        ranks = arguments.ranks or (2 if get_accelerator().device_name() == "cpu" else get_accelerator().device_count())
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--module"]
        return subprocess.run([*command, "deepspeed.comm.bench", *sys.argv[1:]]).returncode
    comm.init_distributed(arguments.backend)
    try:
        chosen = [name for name in OPERATIONS if getattr(arguments, name)] or list(OPERATIONS)
        curve = {operation: measure(operation, arguments) for operation in chosen}
        if comm.get_rank() == 0:
            path = Path(arguments.output)
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {
                "ranks": comm.get_world_size(),
                "dtype": arguments.dtype,
                "device": get_accelerator().device_name(),
            }
            path.write_text(json.dumps({**about, "curve": curve}, indent=1))
            print(
                f"written: {path}; the comms logger prints it beside a run with comms_logger.curve: {path}", flush=True
            )
            if not arguments.no_plot:
                try:
                    draw(curve, path.with_suffix(".png"))
                except NotAvailableError as error:
                    print(error, flush=True)
    finally:
        comm.destroy_process_group()
    return 0


def measure(operation: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Measure one of `OPERATIONS` at each message size, and print a table on rank 0. All ranks must call this.

    Args:
        arguments: command-line arguments, parsed by `parser`.

    Returns:
        A row per size: bytes, seconds (slowest rank), algbw and busbw in 10⁹ bytes per second.

    Raises:
        ArgumentError: dtype or maximum size are invalid, or with `--debug` a result is wrong.
    """
    rows = []
    dtype = getattr(torch, arguments.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"--dtype {arguments.dtype} is no dtype of torch")
    if arguments.maxsize < _SMALLEST:
        raise ArgumentError(f"--maxsize {arguments.maxsize}: 2^{arguments.maxsize} bytes; give at least {_SMALLEST}")
    least = torch.tensor([get_accelerator().available_memory()], dtype=torch.float64)
    comm.all_reduce(least, comm.ReduceOp.MIN)  # all ranks measure the same sizes
    free = float(least) * arguments.mem_factor
    powers = range(_SMALLEST, arguments.maxsize + 1) if arguments.scan else [arguments.maxsize]
    for nbytes in (1 << power for power in powers if power == _SMALLEST or 1 << power <= free):
        call, check = make_call(operation, nbytes, dtype, arguments.dist, arguments.async_op)
        times = _times(call, arguments.warmups, arguments.trials, arguments.async_op)
        if arguments.debug:
            check()
        seconds = torch.tensor([trimmed_mean(times)], dtype=torch.float64)
        comm.all_reduce(seconds, comm.ReduceOp.MAX)
        part = nbytes // comm.get_world_size() if operation in ("all_gather", "reduce_scatter") else nbytes
        speeds = calc_bw_log(_FORMULA.get(operation, operation), part, 1e3 * float(seconds), comm.get_world_size())
        rows.append({"bytes": nbytes, "seconds": float(seconds), "algbw": speeds[0] / 8, "busbw": speeds[1] / 8})
    if comm.get_rank() == 0:
        print(table(operation, rows, arguments), flush=True)
    return rows


def make_call(
    operation: str, nbytes: int, dtype: torch.dtype, whose: str, asynchronous: bool
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Create a function that calls a collective, and a function that raises ArgumentError if its result is wrong.

    Args:
        operation: one of `OPERATIONS`.
        nbytes: size of the whole message on a rank: the output of all-gather, the input of reduce-scatter.
        dtype: dtype of the elements.
        whose: library whose collectives are called: "deepspeed" or "torch".
        asynchronous: make the call return a handle.
    """
    library: Any = comm if whose == "deepspeed" else torch.distributed
    world, rank = comm.get_world_size(), comm.get_rank()
    device = torch.device(get_accelerator().current_device_name())
    count = max(nbytes // dtype.itemsize // world, 1) * world
    whole = torch.ones(count, dtype=dtype, device=device)
    part, out = torch.ones(count // world, dtype=dtype, device=device), torch.zeros_like(whole)

    def pass_on() -> Any:
        if rank == 0:
            return library.isend(whole, 1) if asynchronous else library.send(whole, 1)
        if rank == 1:
            return library.irecv(out, 0) if asynchronous else library.recv(out, 0)
        return None

    calls: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
        "all_reduce": (lambda: library.all_reduce(whole, async_op=asynchronous), whole),
        "all_gather": (lambda: library.all_gather_into_tensor(out, part, async_op=asynchronous), out),
        "reduce_scatter": (lambda: library.reduce_scatter_tensor(part, whole, async_op=asynchronous), part),
        "all_to_all": (lambda: library.all_to_all_single(out, whole, async_op=asynchronous), out),
        "broadcast": (lambda: library.broadcast(whole, 0, async_op=asynchronous), whole),
        "pt2pt": (pass_on, out if rank == 1 else whole),
    }
    call, result = calls[operation]

    def check() -> None:
        """Raise ArgumentError unless all elements are equal and, except after all-reduces, not 0."""
        low, high = float(result.min()), float(result.max())
        if low != high or (low == 0 and operation != "all_reduce"):
            raise ArgumentError(f"{operation} of {nbytes} bytes gave {low} to {high}: it is broken here")

    return call, check


def _times(call: Callable[[], Any], warmups: int, trials: int, asynchronous: bool) -> list[float]:
    """Return the duration of each call in seconds; for asynchronous calls, which overlap, only their mean."""
    accelerator = get_accelerator()
    times: list[float] = []
    for _ in range(warmups):
        work = call()
        if work is not None and asynchronous:
            work.wait()
    comm.barrier()
    if asynchronous:
        accelerator.synchronize()
        begun = now()
        for work in [call() for _ in range(trials)]:
            if work is not None:
                work.wait()
        accelerator.synchronize()
        return [(now() - begun) / 1e9 / trials]
    for _ in range(trials):
        accelerator.synchronize()
        begun = now()
        call()
        accelerator.synchronize()
        times.append((now() - begun) / 1e9)
    return times


def table(operation: str, rows: list[dict[str, float]], arguments: argparse.Namespace) -> str:
    unit, factor = arguments.bw_unit, 8 if arguments.bw_unit == "Gbps" else 1
    lines = [f"---- {operation}, {comm.get_world_size()} ranks, {arguments.dtype}"]
    titles = f"{'Duration':>14}{f'Throughput ({unit})':>20}{f'BusBW ({unit})':>18}"
    lines.append(f"{'Size (Bytes)':<16}{'Description':<22}{titles}")
    for row in rows:
        nbytes = int(row["bytes"])
        size = str(nbytes) if arguments.raw else convert_size(nbytes)
        elements = nbytes // getattr(torch, arguments.dtype).itemsize
        duration = f"{1e6 * row['seconds']:.1f}" + ("" if arguments.raw else " us")
        speeds = f"{factor * row['algbw']:>20.3f}{factor * row['busbw']:>18.3f}"
        lines.append(f"{size:<16}{f'{elements} elements':<22}{duration:>14}{speeds}")
    return "\n".join(lines)


def draw(curve: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Plot bus bandwidth in Gbit/s over message size.

    Args:
        curve: the rows of `measure` by operation.
        path: image file to write.

    Raises:
        NotAvailableError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise NotAvailableError("the picture needs matplotlib: pip install 'deepspeed[plot]'")
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    for operation, rows in curve.items():
        axes.plot([row["bytes"] for row in rows], [8 * row["busbw"] for row in rows], marker="o", label=operation)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the message")
    axes.set_ylabel("bus bandwidth, Gbit/s")
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path, bbox_inches="tight", dpi=110)


if __name__ == "__main__":
    sys.exit(main())
