"""The examples of compression, as users start them: digits with its bars, the language model at toy size."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def started(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (2, 3)])
def test_digits(tmp_path: Path, ranks: int, stage: int) -> None:
    for name in ("torch_pruning", "sklearn"):
        if importlib.util.find_spec(name) is None:  # importing it here would leave its environment variables behind
            pytest.skip(f"{name} is not installed")
    told = tmp_path / "row.json"
    script = str(ROOT / "examples/compress/digits.py")
    started("--num_gpus", str(ranks), script, "--stage", str(stage), "--json", str(told), folder=tmp_path)
    row: dict[str, Any] = json.loads(told.read_text())
    print(row)
    assert row["cut"] >= 0.97 and row["parameters"] <= 0.26 and row["faster"] >= 2.5, row


@pytest.mark.slow
def test_every_row_of_the_language_model(tmp_path: Path) -> None:
    """Sizes and shapes; bars of quality are for the real size."""
    small = "--width 32 --layers 2 --heads 2 --sequence 32 --train_bytes 6000 --more_bytes 3000 --heldout_bytes 2000"
    packs = importlib.util.find_spec("compressed_tensors") is not None
    script = str(ROOT / "examples/compress/language.py")
    names = ["--only", "single", "2:4", "FFN", "layers", "one-shot", *(["int"] if packs else [])]
    started("--num_gpus", "1", script, *small.split(), "--seeds", "0", *names, folder=tmp_path)
    rows = {row["name"]: row for row in json.loads((tmp_path / "runs/compress/rows.json").read_text())}
    dense = rows["dense"]["parameters"]
    assert rows["single weights -50%"]["parameters"] == dense
    ffn = 2 * (2 * 32 * 128 + 128)  # two layers: in, out, and the bias between
    assert rows["FFN -50%"]["parameters"] == rows["one-shot taylor"]["parameters"] == dense - ffn // 2
    assert rows["layers -> 1"]["parameters"] < rows["FFN -50%"]["parameters"]
    assert (tmp_path / "runs/compress/loss_over_size.png").stat().st_size > 1000
