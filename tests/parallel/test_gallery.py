"""The examples of the gallery, as users start them: they reach their bars, and draw."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(folder: Path, *command: str) -> str:
    """What a command printed that ended well, started in a folder of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KERAS_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def launched(folder: Path, script: str, *arguments: str) -> str:
    return run(
        folder, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(ROOT / "examples" / script), *arguments
    )


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: it comes with the extra `examples`")


def drawn(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_digits(tmp_path: Path) -> None:
    needs("sklearn")
    said = launched(tmp_path, "gallery/digits.py")
    assert float(re.findall(r"([\d.]+) % of the unseen", said)[0]) > 96, said
    drawn(tmp_path / "runs/gallery/digits.png")


def test_keras(tmp_path: Path) -> None:
    needs("sklearn", "keras")
    said = launched(tmp_path, "keras/digits.py")
    assert float(re.findall(r"([\d.]+) % of the unseen", said)[0]) > 90, said
    drawn(tmp_path / "runs/keras/digits.png")


def test_lora(tmp_path: Path) -> None:
    said = launched(tmp_path, "gallery/lora.py")
    (start, end) = map(float, re.findall(r"([\d.]+) -> ([\d.]+) nats", said)[0])
    assert end < start - 0.3, said
    drawn(tmp_path / "runs/gallery/lora.png")


def test_experts(tmp_path: Path) -> None:
    said = launched(tmp_path, "experts/language.py", "--short")
    dense, experts = [
        tuple(map(float, numbers)) for numbers in re.findall(r"([\d.]+) M active.*held out ([\d.]+)", said)
    ]
    assert experts[0] < 1.1 * dense[0] and max(dense[1], experts[1]) < 5, said  # even bytes: 5.5 nats
    drawn(tmp_path / "runs/experts/load.png")


def test_evoformer(tmp_path: Path) -> None:
    said = launched(tmp_path, "evoformer/train.py")
    assert float(re.findall(r"unseen alignments ([\d.]+) % are found", said)[0]) > 80, said


def test_gan(tmp_path: Path) -> None:
    said = launched(tmp_path, "gallery/gan.py")
    (reached, share) = map(int, re.findall(r"(\d) of 8 clusters are reached, (\d+) %", said)[0])
    assert reached >= 7 and share > 70, said
    drawn(tmp_path / "runs/gallery/gan.png")


def test_resume(tmp_path: Path) -> None:
    said = run(tmp_path, str(ROOT / "examples/gallery/resume.py"))
    assert float(said.split()[-1]) < 1e-5, said
    drawn(tmp_path / "runs/gallery/resume.png")


def test_nvme(tmp_path: Path) -> None:
    said = run(tmp_path, str(ROOT / "examples/gallery/nvme.py"))
    (state, most) = map(int, re.findall(r"(\d+) MiB of state trained in at most (\d+) MiB", said)[0])
    assert state > 2 * most, said
    drawn(tmp_path / "runs/gallery/nvme.png")


def test_the_notebook(tmp_path: Path) -> None:
    needs("nbconvert", "ipykernel")
    source = str(ROOT / "examples/gallery/live_loss.ipynb")
    run(tmp_path, "-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir", str(tmp_path), source)
    cells = json.loads((tmp_path / "live_loss.ipynb").read_text())["cells"]
    kinds = [kind for cell in cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert kinds.count("image/png") >= 2
    assert "mean loss of the last 50 steps" in json.dumps(cells[-1]["outputs"])
