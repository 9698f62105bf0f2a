"""Examples of rollouts: `grpo.py` learns alike at stages 0 and 3, `trained.py` has exact log-probabilities."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.clients.test_sft import tiny
from tests.harness.pool import PATIENCE
from tests.trained import base

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


def chat_model(folder: Path) -> None:
    """A folder of random weights with a native form, and a tokenizer with a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tiny(folder)
    shape = AutoConfig.from_pretrained(folder / "model")
    shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim = 64, 4, 2, 16
    shape.eos_token_id = AutoTokenizer.from_pretrained(folder / "model").eos_token_id
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "dpo"])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (3, 2)])
def test_the_trained_model_is_updated_with_exact_log_probabilities(
    tmp_path: Path, method: str, stage: int, ranks: int
) -> None:
    chat_model(tmp_path)
    start = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)] if ranks > 1 else []
    options = ["--model", "model", "--method", method, "--updates", "2", "--prompts", "3", "--pool", "6"]
    said = run(tmp_path, *start, str(EXAMPLE / "trained.py"), *options, "--stage", str(stage), "--output", ".")
    figures = json.loads((tmp_path / f"trained-{method}.json").read_text())
    before, after = figures["held_out"]
    assert before["kl"] == 0 and after["kl"] > 0 and 0 <= before["reward"] <= 1
    if method == "grpo":
        assert said.count("ratios all 1") == 2 and len(figures["rewards"]) == 2
    else:
        losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", said)]
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[1] != losses[0], losses
    assert (tmp_path / "trained.png").stat().st_size > 10_000
    assert (tmp_path / f"adapter-{method}" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_two_updates_of_the_model_of_135_million_parameters(tmp_path: Path) -> None:
    folder, options = base(), ["--updates", "2", "--prompts", "2", "--tokens", "8", "--layers", "4", "--output", "."]
    said = run(tmp_path, str(EXAMPLE / "trained.py"), "--model", str(folder), *options)
    assert said.count("ratios all 1") == 2
    before, after = json.loads((tmp_path / "trained-grpo.json").read_text())["held_out"]
    assert before["kl"] == 0 and 0 < after["kl"] < 0.5
