"""How many files of the package a training step enters: what a reader of one has to open.

Five units, Adam, clipping, one rank on the CPU. Calls are counted with the profiler in the third step, when what is
made once has been made. `python -m tests.architecture.test_step_files` prints the table; names of runs behind it,
as `stage0`, print their files too.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FrameType
from typing import Any

import pytest

from tests.architecture.sources import ROOT
from tests.harness.fresh import run_fresh

UNITS, WIDTH, STEPS = 5, 16, 3
PARTS = ("forward", "backward", "step", "union")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
RUNS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    **{f"stage{stage} offload": {"stage": stage, **OFFLOAD} for stage in range(1, 4)},
    "stage3 offload all": {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}},
}
# Files of the package that `engine.step()` may enter.
BARS = {name: 38 if name.startswith("stage3") else 30 for name in RUNS}

Entered = dict[str, dict[str, list[str]]]  # part: file: functions


class Counter:
    """Notes each function of the package that is entered. On the CPU autograd runs on the thread that calls."""

    def __init__(self) -> None:
        self.entered: Entered = {part: {} for part in PARTS}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Inside, calls belong to the part `name`."""
        functions: defaultdict[str, set[str]] = defaultdict(set)
        package = f"{ROOT}/deepspeed/"

        def note(frame: FrameType, event: str, _argument: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(package):
                functions[code.co_filename.removeprefix(package)].add(code.co_name)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
        for part in (name, "union"):
            for file, names in functions.items():
                self.entered[part][file] = sorted({*self.entered[part].get(file, ()), *names})


def model() -> Any:
    """Five units of a layer with a nonlinearity."""
    import torch

    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(UNITS)]
    return torch.nn.Sequential(*layers)


def entered(zero: dict[str, Any]) -> Entered:
    """Files and functions of the package that the third step enters, by part."""
    import torch

    import deepspeed

    torch.manual_seed(0)
    trained = model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        # small as it is, no parameter stays whole at stage 3
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }
    engine, *_ = deepspeed.initialize(model=trained, model_parameters=trained.parameters(), config=config)
    counter = Counter()
    for turn in range(STEPS):
        part: Callable[[str], Any] = counter.part if turn == STEPS - 1 else nullcontext
        inputs = torch.randn(4, WIDTH)
        with part("forward"):
            loss = engine(inputs).square().mean()
        with part("backward"):
            engine.backward(loss)
        with part("step"):
            engine.step()
    engine.destroy()
    return counter.entered


@cache
def measure() -> dict[str, Entered]:
    """`entered` of each run, in one process of their own."""
    code = "import json; from tests.architecture.test_step_files import *; print(json.dumps(all_entered()))"
    (text,) = run_fresh([code])
    return json.loads(text.splitlines()[-1])


def all_entered() -> dict[str, Entered]:
    """`entered` of each run."""
    return {name: entered(zero) for name, zero in RUNS.items()}


def row(name: str, counts: Entered) -> str:
    """A line of the table."""
    functions = sum(map(len, counts["step"].values()))
    return f"{name:<20}" + "".join(f"{len(counts[part]):>9}" for part in PARTS) + f"{functions:>20}"


HEADER = f"{'':<20}" + "".join(f"{part:>9}" for part in PARTS) + f"{'functions in step':>20}"


@pytest.mark.parametrize("name", RUNS)
def test_a_step_enters_few_files(name: str) -> None:
    counts = measure()[name]
    print(f"\n{HEADER}\n{row(name, counts)}")
    assert "engine/engine.py" in counts["step"]  # the profiler has seen something
    assert "zero/gradients/reducer.py" in counts["backward"]  # in the hooks of autograd too
    assert len(counts["step"]) <= BARS[name], "\n".join(sorted(counts["step"]))


if __name__ == "__main__":
    shown = sys.argv[1:]
    print(HEADER)
    for each, result in measure().items():
        print(row(each, result))
        if each in shown:
            for file, names in sorted(result["step"].items()):
                print(f"    {file}: {', '.join(names)}")
