"""TRL's own scripts under `accelerate launch --config_file`, unedited, on two CPU ranks: the stages agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients import trl_runs
from tests.clients.transformers_runs import small_model
from tests.harness.pool import REPOSITORY, free_port

STEPS, BAR = 4, 1e-4
SIZES = {"hidden_size": 192}  # matrices above the 100,000 elements under which stage 3 keeps a parameter whole
TEXTS = {"sft": {"text": 10}, "reward": {"prompt": 4, "chosen": 5, "rejected": 5}}
TEXTS |= {"dpo": TEXTS["reward"], "grpo": {"prompt": 4}}
LENGTHS = {kind: ["--max_length", "32"] for kind in ("sft", "dpo", "reward")} | {
    "grpo": ["--max_completion_length", "8", "--num_generations", "2", "--beta", "0.01"]
}
LENGTHS["grpo"] += ["--reward_funcs", "tests.clients.trl_runs.distinct_words"]
COMPARED = ("loss", "grad_norm", "learning_rate", "reward", "kl", "mean_token_accuracy", "rewards/margins", "margin")


def prepare(kind: str, folder: Path) -> None:
    """A model with random weights, its tokenizer and its texts, as folders that the script is pointed to."""
    model = trl_runs.reward_model(**SIZES) if kind == "reward" else small_model(**SIZES)
    model.save_pretrained(folder / "model")
    trl_runs.tokenizer().save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    trl_runs.data(**TEXTS[kind]).to_json(folder / "texts" / "train.jsonl")


def launched(kind: str, stage: int, folder: Path) -> list[dict[str, float]]:
    """What the script logged at each step; it has saved a checkpoint and whole weights."""
    out = folder / f"stage{stage}"
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"tests/clients/launch/zero{stage}.yaml", "--main_process_port", str(free_port())]
    command += ["-m", f"trl.scripts.{kind}", "--model_name_or_path", str(folder / "model")]
    command += ["--dataset_name", str(folder / "texts"), "--output_dir", str(out), "--max_steps", str(STEPS)]
    command += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "2e-3"]
    command += ["--bf16", "false", "--dtype", "float32", "--logging_steps", "1", "--save_steps", str(STEPS)]
    command += ["--report_to", "none", "--seed", "3", *LENGTHS[kind]]
    paths = [str(REPOSITORY / "tests/programs/on_cpu"), str(REPOSITORY)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "CI": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert list(out.glob("model*.safetensors"))
    logged = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in logged if "grad_norm" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_the_script_trains_alike_at_every_stage(kind: str, tmp_path: Path) -> None:
    prepare(kind, tmp_path)
    runs = [launched(kind, stage, tmp_path) for stage in range(4)]
    assert all(len(run) == STEPS for run in runs)
    for name in COMPARED:
        figures = [[entry[name] for entry in run] for run in runs if name in run[0]]
        for stage, found in enumerate(figures):
            gaps = [abs(one - other) for one, other in zip(found, figures[0], strict=True)]
            print(kind, name, "stage", stage, "largest gap", max(gaps), found)
            assert max(gaps) <= BAR, (name, stage, found, figures[0])
