"""Twenty kills of a run with int4 gradients and error memory: it goes on with the losses of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.pool import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, KILLS = 40, 20
SCRIPT = """
    import json, os, signal, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    import deepspeed

    folder, stage, die_at, die_where = Path(sys.argv[-4]), int(sys.argv[-3]), int(sys.argv[-2]), sys.argv[-1]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    wire = {"gradients_within_host": "int4", "weights_within_host": "int8", "error_reset": 7}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "wire": wire,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    if (folder / "latest").exists():
        engine.load_checkpoint(folder)
    def die(where):
        if engine.global_steps == die_at and where == die_where and dist.get_rank() == die_at % 2:
            os.kill(os.getpid(), signal.SIGKILL)
    while engine.global_steps < STEPS:
        step, losses = engine.global_steps, []
        for micro in range(2):
            draw = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            loss = engine(torch.randn(2, 24, generator=draw)).square().mean()
            engine.backward(loss)
            die("backward")
            engine.step()
            losses.append(loss.item())
        die("step")
        engine.save_checkpoint(folder, tag=f"step{engine.global_steps % 2}")
        with open(folder / f"losses{dist.get_rank()}.jsonl", "a") as file:
            file.write(json.dumps([step, losses]) + "\\n")
"""


def run(folder: Path, stage: int, die_at: int, where: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("STEPS", str(STEPS)))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(folder), str(stage), str(die_at), where], env=environment, timeout=120 * PATIENCE, check=False,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ).returncode  # fmt: skip


def losses(folder: Path, rank: int) -> dict[int, list[float]]:
    """The losses of each step; a step that ran twice must have had the same ones."""
    found: dict[int, list[float]] = {}
    for line in (folder / f"losses{rank}.jsonl").read_text().splitlines():
        step, values = json.loads(line)
        assert found.setdefault(step, values) == values, (rank, step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_kills_change_no_loss(tmp_path: Path, stage: int) -> None:
    assert run(tmp_path / "undisturbed", stage, -1, "") == 0
    draw = random.Random(stage)
    at = sorted(draw.sample(range(1, STEPS), KILLS))
    for step in at:
        assert run(tmp_path / "killed", stage, step, draw.choice(["backward", "step"])) != 0
    assert run(tmp_path / "killed", stage, -1, "") == 0
    for rank in range(2):
        assert losses(tmp_path / "killed", rank) == losses(tmp_path / "undisturbed", rank)
        assert len(losses(tmp_path / "killed", rank)) == STEPS
