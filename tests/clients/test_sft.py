"""Fine-tuning as docs/sft.md shows it: the page's program and JSON, on a tiny model; the trained one in slow tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.common import fresh_clients, zero
from tests.harness.pool import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sft.md").read_text()
EXAMPLE = ROOT / "examples" / "sft"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant> {% endif %}"
SAID = re.compile(r"^step \d+: ([\d.]+)|^held out: ([\d.]+) before, ([\d.]+) after", re.MULTILINE)
STEPS = 6


def tiny(folder: Path, heads: int = 3) -> None:
    """A model of random weights with a tokenizer that knows the words of the chats, and the chats."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    answers = [" ".join(f"w{(at + more) % 13}" for more in range(at % 5 + 2)) for at in range(40)]
    pairs = [(f"w{at % 11} w{at % 7}", answer) for at, answer in enumerate(answers)]
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
    words = ["<unk>", "</s>", "<user>", "<assistant>", *(f"w{at}" for at in range(13))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE + PROMPT
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(words), hidden_size=8 * heads, intermediate_size=32, num_hidden_layers=3, head_dim=8,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def run_program(folder: str, stage: int, *words: str) -> list[float]:
    """On a worker: the page's program under its own JSON at a stage; the losses that rank 0 prints, held out last."""
    config = json.loads((EXAMPLE / "ds_config.json").read_text())
    config["optimizer"]["params"]["lr"] = 1e-2
    config["zero_optimization"] = zero(stage)
    given = ["--model", f"{folder}/model", "--data", f"{folder}/chats.jsonl", "--config", f"{folder}/{stage}.json"]
    Path(folder, f"{stage}.json").write_text(json.dumps(config))
    before, said = sys.argv, io.StringIO()
    sys.argv = ["train.py", *given, "--output", f"{folder}/{stage}", "--steps", str(STEPS), "--held_out", "9", *words]
    try:
        with fresh_clients(), contextlib.redirect_stdout(said):
            runpy.run_path(str(EXAMPLE / "train.py"))
    finally:
        sys.argv = before
    return [float(one) for found in SAID.findall(said.getvalue()) for one in found if one]


def reloaded_loss(folder: Path, adapters: bool) -> float:
    """The held-out loss of the folder that the program wrote, in plain Transformers."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder.parent / "model" if adapters else folder)
    model = PeftModel.from_pretrained(model, folder) if adapters else model
    total, count = 0.0, 0
    for line in (folder.parent / "chats.jsonl").read_text().splitlines()[:8]:
        chat = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(chat, return_dict=False)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[len(prompt) :]), reduction="sum").item()
        count += len(tokens) - len(prompt)
    return total / count


def test_the_page_shows_the_example() -> None:
    shown = re.findall(r"```(?:python|json)\n(.*?)```", PAGE, re.DOTALL)
    assert (EXAMPLE / "train.py").read_text() in shown
    assert (EXAMPLE / "ds_config.json").read_text() in shown


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        pytest.param((), (0, 3), id="whole"),
        pytest.param((), (0, 1, 2, 3), id="whole-every", marks=pytest.mark.slow),
        pytest.param(("--lora", "4"), (2, 3), id="lora"),
    ],
)
def test_the_program_tunes_alike_at_every_stage(
    workers: Any, tmp_path: Path, words: tuple[str, ...], stages: tuple[int, ...]
) -> None:
    tiny(tmp_path)
    first = None
    for stage in stages:
        losses, *others = workers(2).run(run_program, str(tmp_path), stage, *words, timeout=120)
        assert not any(others), "rank 0 alone prints"
        assert len(losses) == STEPS + 2 and losses[-1] < losses[-2] - 0.01, losses
        first = first or losses
        assert losses == pytest.approx(first, abs=2e-4)  # printed with four digits
        assert reloaded_loss(tmp_path / str(stage), bool(words)) == pytest.approx(losses[-1], abs=1e-4)
    if words:
        merge(tmp_path, tmp_path / str(stages[-1]))
        assert reloaded_loss(tmp_path / "merged", False) == pytest.approx(losses[-1], abs=1e-4)


def merge(folder: Path, adapters: Path) -> None:
    """Run the page's block on folders of the test."""
    (block,) = [shown for shown in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "merge_and_unload" in shown]
    folders = {"smollm2": folder / "model", "adapters": adapters, "merged": folder / "merged"}
    for name, path in folders.items():
        block = block.replace(f'"{name}"', repr(str(path)))
    exec(block, {})


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "train.py"), "--model", "x", "--data", "x", "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120 * PATIENCE)
    assert ended.returncode == 1 and f"{tmp_path} exists: name a new folder with --output" in ended.stderr


@pytest.mark.slow
def test_every_way_is_as_one_process(tmp_path: Path) -> None:
    """`benchmarks/sft.py` on the trained model if it can be had: its bar is 1e-4 nats at every step."""
    trained = pytest.importorskip("tests.trained", reason="no trained model here")
    command = [sys.executable, "-m", "benchmarks.sft", "--model", str(trained.base()), "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=7200)


@pytest.mark.slow
def test_the_page_on_the_trained_model(tmp_path: Path) -> None:
    """The commands of the page, as a reader types them, with the trained model's folder."""
    trained = pytest.importorskip("tests.trained", reason="no trained model here")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    chats = [sys.executable, str(EXAMPLE / "chats.py"), str(tmp_path / "chats.jsonl")]
    subprocess.run(chats, env=environment, check=True, timeout=120)
    (tmp_path / "ds_config.json").write_bytes((EXAMPLE / "ds_config.json").read_bytes())
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(EXAMPLE / "train.py")]
    command += ["--model", str(trained.base()), "--data", "chats.jsonl", "--steps", "20"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    losses = [float(one) for found in SAID.findall(done.stdout) for one in found if one]
    assert losses[-1] < losses[-2] - 0.05, done.stdout
