"""SIGKILL before, in the ramp, in a removal and after it: the run ends as one that was not killed."""

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

from tests.faults.test_checkpoint_kills import finish
from tests.harness.pool import PATIENCE, free_port
from tests.parallel.checkpointing import differences

REPOSITORY = Path(__file__).parents[2]
RANKS, STEPS = 2, 11
# What a rank says before it is killed; a removal has begun on it, or a step.
MOMENTS = ("step 1", "step 4", "removing rows", "removing heads", "step 10")


def start(folder: Path, stage: int) -> list[subprocess.Popen[str]]:
    port, ranks = free_port(), []
    for rank in range(RANKS):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}
        command = [sys.executable, "-m", "tests.faults.compression_run", str(folder), str(stage), str(STEPS)]
        log = (folder / f"rank{rank}.log").open("a")
        run = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        ranks.append(run)
    return ranks


def killed_at(ranks: list[subprocess.Popen[str]], moment: str, draw: random.Random) -> bool:
    """Kill one rank or all of them soon after rank 0 has said so; whether it came to that."""
    said = False
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.strip() == moment:
            said = True
            time.sleep(draw.uniform(0.0, 0.05))
            for run in ranks if draw.random() < 0.5 else ranks[draw.randrange(RANKS) :][:1]:
                run.send_signal(signal.SIGKILL)
            break
    finish(ranks, 120 * PATIENCE)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_kills_change_nothing(tmp_path: Path, stage: int) -> None:
    calm, folder, draw = tmp_path / "calm", tmp_path / "killed", random.Random(stage)
    for one in (calm, folder):
        one.mkdir()
    assert finish(start(calm, stage), 120 * PATIENCE) == [0] * RANKS, (calm / "rank0.log").read_text()[-3000:]
    for moment in MOMENTS:
        assert killed_at(start(folder, stage), moment, draw), f"no rank said {moment!r}"
    assert finish(start(folder, stage), 120 * PATIENCE) == [0] * RANKS, (folder / "rank0.log").read_text()[-3000:]
    assert not differences(torch.load(folder / "final.pt"), torch.load(calm / "final.pt"))
