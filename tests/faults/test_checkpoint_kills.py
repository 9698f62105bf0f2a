"""SIGKILL at random moments, of one rank or of all, in training and in saving: the run goes on as if nothing were."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.harness.pool import free_port
from tests.parallel.checkpointing import differences

REPOSITORY = Path(__file__).parents[2]
RANKS, STEPS = 2, 14


def start(folder: Path, stage: int) -> list[subprocess.Popen[str]]:
    port, ranks = free_port(), []
    for rank in range(RANKS):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}
        command = [sys.executable, "-m", "tests.faults.checkpoint_run", str(folder), str(stage), str(STEPS)]
        log = (folder / f"rank{rank}.log").open("a")
        run = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        ranks.append(run)
    return ranks


def finish(ranks: list[subprocess.Popen[str]], timeout: float = 120) -> list[int]:
    return [run.wait(timeout) for run in ranks]


def killed(ranks: list[subprocess.Popen[str]], draw: random.Random) -> None:
    """Wait until training has begun, then kill after a random time, and see that all ranks end."""
    for run in ranks:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
    time.sleep(draw.uniform(0.0, 2.0))
    for run in ranks if draw.random() < 0.5 else ranks[draw.randrange(RANKS) :][:1]:
        run.send_signal(signal.SIGKILL)
    finish(ranks)


def uninterrupted(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    folder.mkdir()
    assert finish(start(folder, stage)) == [0] * RANKS
    return torch.load(folder / "final.pt")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3, 0])
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, stage: int) -> None:
    wanted = uninterrupted(tmp_path / "calm", stage)
    folder, draw = tmp_path / "killed", random.Random(stage)
    folder.mkdir()
    for _ in range(5):
        killed(start(folder, stage), draw)
    codes = finish(start(folder, stage))
    assert codes == [0] * RANKS, (folder / "rank0.log").read_text()[-3000:]
    assert not differences(torch.load(folder / "final.pt"), wanted)
