"""What `ds_new` writes runs, for each option; what it cannot write it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.launcher.project_template import main

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = [
    *([*model] for model in (["--model", "vectors"], ["--model", "images"], ["--model", "text"])),
    *(["--stage", str(stage)] for stage in (0, 1, 2, 3)),
    *(["--precision", precision] for precision in ("fp32", "bf16", "fp16")),
    ["--offload", "cpu"],
    ["--offload", "nvme"],
    ["--offload", "nvme", "--stage", "3", "--model", "text", "--precision", "bf16"],
    ["--batch", "64", "--accumulate", "2"],
]


def run(folder: Path, *arguments: str, ranks: int = 2) -> list[float]:
    """The loss of each epoch, from a run that ended well."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "train.py", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_what_it_writes_runs_and_learns(tmp_path: Path, options: list[str]) -> None:
    assert main([str(tmp_path / "new"), *options]) == 0
    losses = run(tmp_path / "new")
    assert len(losses) == 3 and losses[-1] < 0.9 * losses[0], losses


@pytest.mark.slow
def test_with_checkpoints_it_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--checkpoints", "--stage", "3"]) == 0
    first = run(tmp_path, "--epochs", "2")
    then = run(tmp_path, "--epochs", "3", ranks=1)
    assert len(first) == 2 and len(then) == 1 and then[0] < first[-1]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_the_json_resolves(tmp_path: Path, options: list[str]) -> None:
    assert main([str(tmp_path), *options]) == 0
    assert DeepSpeedConfig(json.loads((tmp_path / "ds_config.json").read_text()), world=2).train_batch_size
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stage", "0", "--offload", "cpu"], "--stage 1, 2 or 3"),
        (["--batch", "5", "--accumulate", "2"], "--accumulate"),
    ],
)
def test_what_it_cannot_write_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main([str(tmp_path / "new"), *options]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_it_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert main([str(tmp_path)]) == 1
    assert "--force" in capsys.readouterr().err and (tmp_path / "train.py").read_text() == "mine"
    assert main([str(tmp_path), "--force"]) == 0
