"""`benchmarks.smaller`: a row that is killed goes on from its last checkpoint, with the bits of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import PATIENCE
from tests.programs.stand_ins import byte_tokenizer

ROOT = Path(__file__).resolve().parents[3]
ROW = "shallow, distilled"
pytestmark = pytest.mark.slow


def toy(folder: Path) -> Path:
    """A folder of a random Llama with four layers and a tokenizer of bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2}  # fmt: skip
    LlamaForCausalLM(LlamaConfig(vocab_size=len(byte_tokenizer(folder)), **sizes)).save_pretrained(folder)
    return folder


def start(model: Path, output: Path) -> subprocess.Popen[str]:
    """The benchmark on the toy: ten steps, a checkpoint every three, the removal of layers before the third."""
    sizes = "--steps 10 --rows 2 --length 16 --held_out 4 --layers 2 --rounds 1 --save_every 3".split()
    command = [sys.executable, "-m", "benchmarks.smaller", "--model", model, "--output", output, *sizes, "--only", ROW]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True)  # fmt: skip


def end(process: subprocess.Popen[str]) -> str:
    """What it printed on both streams, once it has ended."""
    printed, errors = process.communicate(timeout=600 * PATIENCE)
    assert "over dense" in printed, errors[-3000:]  # the toy may miss the bar
    return printed + errors


def losses(output: Path) -> dict[str, list[float]]:
    """The losses of both rows."""
    return {name: json.loads((output / name / "row.json").read_text())["losses"]
            for name in ("dense", "shallow-distilled")}  # fmt: skip


def test_a_killed_row_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    model = toy(tmp_path / "toy")
    end(start(model, tmp_path / "whole"))

    process = start(model, tmp_path / "killed")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"{ROW}: step 8,"):  # two steps after the last checkpoint
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "killed" / "shallow-distilled" / "row.json").exists()
    printed = end(start(model, tmp_path / "killed"))
    assert "dense: step" not in printed  # that row was there
    assert f"{ROW}: step 7," in printed and f"{ROW}: step 6," not in printed

    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert all(len(row) == 10 for row in losses(tmp_path / "whole").values())
