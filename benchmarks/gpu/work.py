"""A part's process: row after row until the time is over, each row written as soon as it is known."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import PARTS, MissingError, Part, Row, Setting
from benchmarks.gpu.results import BEGUN, FAILED, MISSING, OK, WRONG, Facts, Results

BROKEN = 3  # exit code: the device's context is lost, and the rest needs a fresh process
REPOSITORY = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


def sources() -> str:
    """Return a checksum of the package's Python files, which tells trees apart where there is no git."""
    checksum = 0
    for path in sorted((REPOSITORY / "deepspeed").rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"{checksum:08x}"


def probe(rehearse: bool) -> str:
    """Return the card's name and torch's version, or "" where torch sees no card."""
    prepare(rehearse)
    import torch

    return f"{torch.cuda.get_device_name()}\n{torch.__version__}" if torch.cuda.is_available() else ""


def prepare(rehearse: bool) -> None:
    """Before torch is imported: put the emulated device into it for a rehearsal."""
    if rehearse:
        from tests.emulated import device  # noqa: F401  it registers itself


def _fatal(error: Exception) -> bool:
    """Whether every later call of the device in this process would fail too."""
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"


def _measured(part: Part, row: Row, setting: Setting) -> tuple[str, Facts, bool]:
    """Return the row's state, its facts, and whether the device is lost."""
    try:
        module, _, attribute = part.function.partition(":")
        facts = getattr(importlib.import_module(module), attribute)(setting, **row.arguments)
        return (OK if facts.pop("ok", True) else WRONG), facts, False
    except Exception as error:  # noqa: BLE001  a row that fails is a line of the results
        if isinstance(error, MissingError) or type(error).__name__ == "NotAvailableError":
            return MISSING, {"says": " ".join(str(error).split())[:300]}, False
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        traceback.print_exc()
        return FAILED, {"says": text[:300], "trace": traceback.format_exc()[-2000:]}, _fatal(error)


def _settle() -> None:
    """Give back what the last row held."""
    import torch

    gc.collect()
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()


def work(name: str, keys: list[str], until: float, setting: Setting, say: Callable[[str], Any]) -> int:
    """Measure rows of a part until the time is over; returns the exit code.

    Args:
        name: the part's.
        keys: the rows' keys.
        until: time (`time.time()`) after which no row may go on.
        setting: circumstances.
        say: gets a line for each row.
    """
    part = next(part for part in PARTS if part.name == name)
    results, tree = Results(setting.folder), sources()
    for row in (row for row in part.rows if row.key in keys):
        if time.time() + row.seconds > until:
            continue  # a cheaper one may still fit
        results.append(name, row.key, BEGUN)
        began = time.time()
        own = Setting(setting.rehearse, setting.folder, min(row.seconds, until - began))
        state, facts, lost = _measured(part, row, own)
        took = round(time.time() - began, 2)
        results.append(name, row.key, state, sources=tree, seconds=took, **facts)
        say(f"{name}: {row.key}: {state}, {took:.1f} s: {facts.get('says', '')}")
        if lost:
            return BROKEN
        _settle()
    return 0


def _die_with_parent() -> None:
    """A command that is killed leaves no process on the card."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """The command line that `command.py` writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--keys", nargs="+", required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    _die_with_parent()
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines and clients print belongs into the log
    prepare(options.rehearse)
    setting = Setting(options.rehearse, options.folder, 0.0)
    code = work(options.part, options.keys, options.until, setting, lambda line: print(line, file=lines))
    lines.flush()
    os._exit(code)  # engines of several libraries in one process: skip their competing teardowns


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
