"""Eight LoRA adapters in one batch on the trained model: each equals the merged model alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.adapters import write_adapter
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors.native import FusedExecutor
from tests import trained
from tests.unit.inference.test_adapters import check, finish

pytestmark = pytest.mark.slow
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS, NEW, SLACK = (4, 8, 16, 32), 8, 96 << 20
CLOSE, LARGEST = 1e-5, 20.0  # relative to the largest logits
QUESTIONS = ["What is the capital of France?", "def fibonacci(n):"]


def test_eight_adapters_in_one_batch(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained.base()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for number in range(8):
        targets = ALL if number % 2 else ["q_proj", "v_proj"]
        write_adapter(model, tmp_path / str(number), RANKS[number % 4], targets, number)
    generator = Generator(model, cache_bytes=1 << 27, speculation=4)
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
            generator.submit(Request((name, number), prompt, sampling, adapter=name))
    found = finish(generator)
    generator.close()
    answers = set()
    for name in (None, *range(8)):
        alone: Any = model
        if name is not None:
            wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / str(name))
            alone = wrapped.merge_and_unload().eval()
        for number, prompt in enumerate(prompts):
            tokens, logprobs = found[None if name is None else str(name), number]
            check(alone, prompt, tokens, logprobs, CLOSE * LARGEST)
            answers.add((number, *tokens))
    assert len(answers) > len(prompts)  # some adapter changes tokens
