"""Report the features that this machine and this installation support (`ds_report`)."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from deepspeed import native
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups.init import choose_backend
from deepspeed.comm.watchdog.last_collective import backend_settings
from deepspeed.config.schema import all_keys
from deepspeed.errors import DeepSpeedError, NotAvailableError
from deepspeed.ops.op_builder import compatible_ops
from deepspeed.version import __version__

Rows = list[tuple[str, str]]

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_WIDTH = 120
_LITTLE_SHARED_MEMORY = 1 << 30


def main(args: Sequence[str] | None = None) -> int:
    """Print the report for the command line `args` (None: that of the process).

    Returns:
        0, or 1 if DS_ACCELERATOR names an accelerator that the machine does not have.
    """
    parser = argparse.ArgumentParser(prog="ds_report", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out which features there are")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out what may be in the way")
    options = parser.parse_args(args)
    try:
        parts = {"software": _software(), "machine": _machine(), "accelerator": _accelerator()}
    except DeepSpeedError as error:
        print(f"ds_report: {error}", file=sys.stderr)
        return 1
    if not options.hide_operator_status:
        parts["features"] = _features()
    if not options.hide_errors_and_warnings:
        parts["remarks"] = _remarks()
    if options.json:
        print(json.dumps({title: dict(rows) for title, rows in parts.items()}, indent=2))
        return 0
    texts: list[str] = []
    for title, rows in parts.items():
        width = max((len(name) for name, _ in rows), default=0)
        wrap = functools.partial(
            textwrap.fill, width=_WIDTH, subsequent_indent=" " * (width + 4), break_on_hyphens=False
        )
        if rows:
            texts.append("\n".join([title, *(wrap(f"  {name:<{width}}  {value}") for name, value in rows)]))
    print("\n\n".join(texts))
    return 0


def _software() -> Rows:
    compilers = [name for name in ("cc", "nvcc") if shutil.which(name)]
    return [
        ("deepspeed", f"{__version__} in {Path(__file__).parent}"),
        ("torch", f"{torch.__version__} in {torch.__path__[0]}"),
        ("CUDA of torch", torch.version.cuda or "none"),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("compilers", ", ".join(compilers) or "none (none is needed; torch.compile uses cc)"),
    ]


def _machine() -> Rows:
    memory = psutil.virtual_memory()
    information = Path("/proc/cpuinfo")
    words = set(information.read_text().split()) if information.exists() else set[str]()
    flags = [flag for flag in _CPU_FLAGS if flag in words]
    return [
        ("system", platform.platform()),
        ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        ("CPU features", ", ".join(flags) or "unknown"),
        ("memory", f"{_gib(memory.available)} free of {_gib(memory.total)}"),
        ("/dev/shm", f"{_gib(_shared_memory())} free"),
    ]


def _accelerator() -> Rows:
    accelerator = get_accelerator()
    backends: list[str] = []
    for name in dict.fromkeys(("gloo", accelerator.communication_backend_name())):
        with contextlib.suppress(NotAvailableError):
            backends.append(choose_backend(name))
    fast = {"bf16": accelerator.is_bf16_fast(), "fp16": accelerator.is_fp16_fast()}
    return [
        ("kind", accelerator.device_name()),
        ("devices", ", ".join(_gib(accelerator.total_memory(i)) for i in range(accelerator.device_count()))),
        ("fast dtypes", ", ".join(["fp32", *(name for name, is_fast in fast.items() if is_fast)])),
        ("slow dtypes", ", ".join(name for name, is_fast in fast.items() if not is_fast) or "none"),
        ("communication", ", ".join(backends)),
        ("set for it", backend_settings() or "nothing (NCCL_*, GLOO_*)"),
    ]


def _features() -> Rows:
    """List the configuration blocks, the native library and the operators as available or not available."""
    statuses: dict[str, set[str]] = {}
    for key in all_keys():
        block, dot, _ = key.path.partition(".")
        if dot:
            statuses.setdefault(block.removesuffix("[]"), set()).add(key.note.status)
    missing = {block for block, seen in statuses.items() if "implemented" not in seen}
    return [
        ("available", ", ".join(sorted(statuses.keys() - missing))),
        ("not yet", ", ".join(sorted(missing))),
        ("native library", native.state()),
        ("operators", ", ".join(name for name, there in compatible_ops().items() if there)),
        ("operators not yet", ", ".join(name for name, there in compatible_ops().items() if not there)),
    ]


def _remarks() -> Rows:
    remarks: Rows = []
    if get_accelerator().device_name() == "cpu":
        remarks.append(("accelerator", "none: `deepspeed --num_gpus N` starts N ranks on the CPU; fp16 is slow there"))
    if _shared_memory() < _LITTLE_SHARED_MEMORY:
        remarks.append(("/dev/shm", "less than 1 GiB free: data loader workers and NCCL may end with SIGBUS"))
    return remarks


def _shared_memory() -> int:
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
