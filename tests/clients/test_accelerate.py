"""Accelerate beside plain training: its launcher, several models, stand-ins, mapped optimizers, its saved state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import accelerate_runs as runs
from tests.clients.common import ACCUMULATION, CLIP, MICRO, close, without, zero
from tests.harness.pool import REPOSITORY, free_port

FLAGS = ["--gradient_accumulation_steps", str(ACCUMULATION), "--gradient_clipping", str(CLIP)]


def launch(folder: Path, *flags: str) -> dict[str, Any]:
    """What two processes of `accelerate launch` noted."""
    result = folder / "result.json"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", *flags]
    command += ["--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(free_port()), "tests/clients/launched.py", str(result)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(result.read_text())


def check(found: dict[str, Any], workers: Any, stage: int) -> None:
    wanted = workers(2).run(without, runs.train, "fp32", timeout=90)[0]
    assert (found["stage"], found["ranks"], found["updates"]) == (stage, 2, wanted.updates)
    close(found["losses"], wanted.losses, 1e-5, "losses")
    close(found["norms"], wanted.norms, 1e-4, "gradient norms")
    close(found["rates"], wanted.rates, 1e-9, "learning rates")


@pytest.mark.slow  # the same through a file of settings is fast
@pytest.mark.parametrize("stage", range(4))
def test_accelerate_launch_with_flags(workers: Any, stage: int, tmp_path: Path) -> None:
    check(launch(tmp_path, "--zero_stage", str(stage), "--mixed_precision", "no", *FLAGS), workers, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate_launch_with_a_json(workers: Any, stage: int, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": zero(stage),
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    check(launch(tmp_path, "--deepspeed_config_file", str(tmp_path / "ds.json")), workers, stage)


def test_several_models(workers: Any) -> None:
    workers(2).run(runs.several_models, timeout=120)


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
def test_optimizer_and_schedule_of_the_json(workers: Any, stage: int) -> None:
    workers(2).run(runs.dummies, stage, timeout=90)


MAPPED = {"AdamW": "DeepSpeedCPUAdam", "Adam": "DeepSpeedCPUAdam"}  # Accelerate hands Adagrad a keyword of Adam


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", MAPPED)
def test_torchs_optimizers_become_cpu_ones_when_offloaded(workers: Any, optimizer: str, stage: int) -> None:
    workers(2).run(runs.mapped, stage, optimizer, MAPPED[optimizer], timeout=90)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_accelerate_saves_and_loads(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(runs.saved_and_loaded, stage, str(tmp_path), timeout=180)


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
def test_a_schedule_free_optimizer_evaluates_with_its_averages(workers: Any, stage: int) -> None:
    workers(2).run(runs.averaged, stage, timeout=120)
