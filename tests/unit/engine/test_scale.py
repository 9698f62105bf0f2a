"""The arithmetic of many ranks and large models: bytes of state, one step, what is gathered ahead; on meta tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.fresh import run_fresh

REPOSITORY = Path(__file__).parents[3]
SCALE = """
import contextlib, io, runpy, sys
sys.argv = ["scale.py", "--stages", "{stage}"]
with contextlib.redirect_stdout(io.StringIO()) as shown:
    runpy.run_path("benchmarks/scale.py", run_name="__main__")
assert shown.getvalue().count("held") == 1, shown.getvalue()
"""


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    arguments = [sys.executable, *command]
    done = subprocess.run(arguments, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_simulated_rank_of_1024_holds_what_the_formula_says(stage: int) -> None:
    run_fresh([SCALE.format(stage=stage)])


@pytest.mark.slow
def test_large_units_are_gathered_ahead_within_the_limits():
    assert run("benchmarks/prefetch.py", "--dry", "--layers", "4").count("True") == 9


@pytest.mark.slow
def test_large_models_are_gathered_ahead_within_the_limits():
    assert run("benchmarks/prefetch.py", "--dry").count("True") == 9
