"""What is right or wrong on a card: the accelerator's contract, tests, kernels, losses."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import MissingError, Setting
from benchmarks.gpu.results import Results
from benchmarks.gpu.work import REPOSITORY

BARS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # a card sums in other orders than a CPU
CPU_LOSSES = ("parity", "on the CPU")
NO_TESTS = 5  # pytest's exit code


def contract(setting: Setting, what: str) -> dict[str, Any]:
    """The part `contract`."""
    return _tests(setting) if what == "tests" else _contract()


def _contract() -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.testing import accelerator_checks

    failed = []
    checks = list(accelerator_checks())
    for check in checks:
        try:
            check(get_accelerator())
        except Exception as error:  # noqa: BLE001  each check's failure is said
            failed.append(f"{check}: {error}")
    says = f"{len(checks) - len(failed)} of {len(checks)} checks of {type(get_accelerator()).__name__} are kept"
    return {"says": "; ".join([says, *failed]), "ok": not failed}


def _tests(setting: Setting) -> dict[str, Any]:
    """Files with tests marked `gpu`; those of kernels are a part of their own."""
    folder = REPOSITORY / "tests"
    marked = [path for path in sorted(folder.rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    files = [str(path.relative_to(REPOSITORY)) for path in marked if path.parent.name != "kernels"]
    if not files:
        return {"says": "no test outside of tests/kernels is marked `gpu`"}
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        raise MissingError("no pytest and hypothesis")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=setting.seconds, check=False)
    print(done.stdout, done.stderr)
    return {"says": " ".join(done.stdout.split()[-20:]), "ok": done.returncode in (0, NO_TESTS)}


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernels(setting: Setting, suite: str) -> dict[str, Any]:
    """The part `kernels`: checks of a suite in a drawn order, until the time is over; or the speed of messages."""
    if suite == "speed":
        from benchmarks.gpu import codecs

        return codecs.measure(setting)
    launched, not_built = _launched(setting, suite)
    from tests.kernels.suites import SUITES

    checks, until = SUITES[suite].checks(), time.perf_counter() + setting.pick(setting.seconds, 3.0)
    ran, left_out, wrong = 0, 0, []
    for name in random.Random(0).sample(sorted(checks), len(checks)):
        if time.perf_counter() > until:
            break
        try:
            checks[name](launched)
            ran += 1
        except not_built:
            left_out += 1
        except Exception as error:  # noqa: BLE001  each failure is said, but a lost device
            if "CUDA error" in str(error):
                raise
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    if not ran and not wrong:
        raise MissingError(f"no compiled kernel for any of {left_out} checks that were drawn")
    says = f"{ran} of {len(checks)} checks hold, {len(wrong)} fail, {left_out} have no compiled kernel"
    return {"says": "; ".join([says, *wrong[:3]]), "ok": not wrong, "wrong": wrong[:20], "ran": ran}


def _launched(setting: Setting, suite: str) -> tuple[Any, type[Exception]]:
    """Return the kernels to check, and the error of one that is not compiled."""
    if setting.rehearse:
        if importlib.util.find_spec("triton") is None:
            raise MissingError("no Triton to interpret the kernels")
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.kernels.interpreter import interpreted
        from tests.kernels.moved import NotBuiltError

        return interpreted(suite), NotBuiltError
    import torch

    from deepspeed.ops.triton.load import load_kernels
    from tests.kernels.moved import MovedKernels, NotBuiltError

    return MovedKernels(load_kernels(), torch.device("cuda")), NotBuiltError


# -- losses ------------------------------------------------------------------------------------------------------------


def _cells(stage: int, few: bool) -> list[Any]:
    """Return the cells of one rank of a stage, of all stages if it is negative; `few`: the first of each stage."""
    from tests.emulated.cells import others, pairwise

    cells = [cell for cell in [*pairwise(), *others(60)] if cell.ranks == 1]
    if few:
        cells = list({cell.stage: cell for cell in reversed(cells)}.values())
    return cells if stage < 0 else [cell for cell in cells if cell.stage == stage]


def losses_of(cells: Sequence[Any]) -> dict[str, list[float]]:
    """Losses of each cell, on the device that `DS_ACCELERATOR` names."""
    from tests.emulated.runs import train

    return {str(cell): train(cell).losses for cell in cells}


def parity(setting: Setting, stage: int) -> dict[str, Any]:
    """The part `parity`: losses of the cells of one rank of the parity table; the CPU's first (stage -1)."""
    if stage < 0:
        losses = _on_the_cpu(setting)
        return {"losses": losses, "says": f"losses of {len(losses)} cells"}
    known = Results(setting.folder).rows().get(CPU_LOSSES, {})
    if "losses" not in known:
        raise MissingError("the CPU's losses are not there")
    cells = _cells(stage, setting.rehearse)
    gaps, wrong = {}, []
    for name, losses in losses_of(cells).items():
        pairs = zip(losses, known["losses"][name], strict=True)
        gaps[name] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    for cell in cells:
        if not gaps[str(cell)] <= BARS[cell.dtype]:
            wrong.append(f"{cell}: {gaps[str(cell)]:.1e} where {BARS[cell.dtype]:.0e} is allowed")
    worst = {dtype: max((gaps[str(c)] for c in cells if c.dtype == dtype), default=0.0) for dtype in BARS}
    says = f"{len(cells)} cells; largest gap " + ", ".join(f"{dtype} {gap:.1e}" for dtype, gap in worst.items())
    return {"says": "; ".join([says, *wrong]), "ok": not wrong, "gaps": gaps}


def _on_the_cpu(setting: Setting) -> dict[str, list[float]]:
    """In a process of its own, which sees no card."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "losses")
        command = [sys.executable, "-m", "benchmarks.gpu.checks", str(path), str(int(setting.rehearse))]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=setting.pick(120, 400), check=True)
        return json.loads(path.read_text())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(losses_of(_cells(-1, sys.argv[2] == "1"))))
