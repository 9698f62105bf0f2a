"""Transformers' Trainer with `torch_compile=True`: the losses of the uncompiled run, at stages 2 and 3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.pool import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
stage, compiled = int(sys.argv[1]), sys.argv[2] == "compiled"
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
rows = [{name: torch.randint(0, 64, (16,)) for name in ("input_ids", "labels")} for _ in range(8)]
arguments = TrainingArguments(
    "out", max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
    torch_compile=compiled, torch_compile_backend="eager" if compiled else None,
    deepspeed={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    },
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
print("loss", trainer.train().training_loss, trainer.model_wrapped._compiling.active)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_compiles_as_without(tmp_path: Path, stage: int) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29791"}
    environment = os.environ | alone | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}
    lines = []
    for way in ("compiled", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(stage), way], cwd=tmp_path, env=environment, capture_output=True,
            text=True, timeout=120 * PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        lines.append(next(line.split() for line in done.stdout.splitlines() if line.startswith("loss ")))
    assert lines[0][1] == lines[1][1]
    assert (lines[0][2], lines[1][2]) == ("True", "False")
