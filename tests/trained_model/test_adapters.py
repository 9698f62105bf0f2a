"""Eight LoRA adapters in one batch on the trained model: each equals the merged model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors.native import FusedExecutor
from tests import trained
from tests.unit.inference.test_adapters import check, finish

pytestmark = pytest.mark.slow
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS, NEW, SLACK = (4, 8, 16, 32), 12, 96 << 20
QUESTIONS = ["What is the capital of France?", "Write a haiku about the sea.", "def fibonacci(n):"]


def test_eight_adapters_in_one_batch(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained.base()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def wrapped(number: int) -> Any:
        targets = ALL if number % 2 else ["q_proj", "v_proj"]
        model = peft.get_peft_model(load(), peft.LoraConfig(r=RANKS[number % 4], lora_alpha=16, target_modules=targets))
        drawn = torch.Generator().manual_seed(number)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.02 * torch.randn(parameter.shape, generator=drawn)
        return model

    for number in range(8):
        wrapped(number).save_pretrained(tmp_path / str(number))
    generator = Generator(load(), cache_bytes=1 << 27, speculation=4)
    assert isinstance(generator._executor, FusedExecutor)
    before = psutil.Process().memory_info().rss
    for number in range(8):
        generator.add_adapter(str(number), tmp_path / str(number))
    grown, size = psutil.Process().memory_info().rss - before, sum(a.nbytes for a in generator.adapters.values())
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert size <= files and grown <= size + SLACK, (size, files, grown)
    prompts = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=1)
    for name in (None, *map(str, range(8))):
        for number, prompt in enumerate(prompts):
            generator.submit(Request((name, number), prompt, sampling, name))
    found = finish(generator)
    generator.close()
    answers = set()
    for name in (None, *range(8)):
        alone = load() if name is None else wrapped(name).merge_and_unload().eval()
        for number, prompt in enumerate(prompts):
            tokens, logprobs = found[None if name is None else str(name), number]
            check(alone, prompt, tokens, logprobs, 1e-4)
            answers.add((number, *tokens))
    assert len(answers) > 2 * len(prompts)
