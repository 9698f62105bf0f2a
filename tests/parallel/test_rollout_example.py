"""`examples/rollouts/grpo.py` learns its task, at stages 0 and 3 by the same first updates, and `draw.py` draws it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.harness.pool import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/rollouts"


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=400 * PATIENCE
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def learned(folder: Path, stage: int, seed: int) -> dict[str, Any]:
    options = ["--stage", str(stage), "--seed", str(seed), "--output", str(folder)]
    run(folder, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(EXAMPLE / "grpo.py"), *options)
    return json.loads((folder / f"grpo-stage{stage}-seed{seed}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_example_learns_alike_at_stages_0_and_3(tmp_path: Path, seed: int) -> None:
    plain, sharded = (learned(tmp_path, stage, seed) for stage in (0, 3))
    for figures in (plain, sharded):
        assert figures["rewards"][0] <= 0.2 and mean(figures["rewards"][-10:]) >= 0.8, figures["rewards"]
    assert plain["first_tokens"] == sharded["first_tokens"] and len(plain["first_tokens"]) == 5
    assert plain["losses"][:5] == pytest.approx(sharded["losses"][:5], abs=1e-6)
    assert plain["norms"][:5] == pytest.approx(sharded["norms"][:5], rel=1e-5) and min(plain["norms"][:5]) > 0
    assert mean(plain["rewards"][-10:]) == pytest.approx(mean(sharded["rewards"][-10:]), abs=0.05)
    said = run(tmp_path, str(EXAMPLE / "draw.py"), "--runs", str(tmp_path), "--output", str(tmp_path / "grpo.png"))
    assert said.count("reward 0.") == 2 and (tmp_path / "grpo.png").stat().st_size > 10_000
