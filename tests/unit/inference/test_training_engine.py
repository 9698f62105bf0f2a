"""A Generator over the model of an engine that trains: right tokens, and the reason why passes are not native."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.inference import Generator, SamplingParams
from tests.parallel.tiny import said, with_words


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)).eval()


def tokens_while_training(stage: int, before: bool) -> None:
    import deepspeed

    model = llama()
    prompt, sampling = [[1, 2, 3]], SamplingParams(max_new_tokens=6, temperature=0.0)
    generator = Generator(model) if before else None
    with said() as lines:
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            },
        )
        generator = generator or Generator(engine.module)
        for _ in range(2):
            ids = torch.arange(8).view(1, 8)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            got = generator.generate(prompt, sampling)[0]
            with torch.no_grad():
                expected = engine.module.generate(torch.tensor(prompt), max_new_tokens=6, do_sample=False)[
                    0, 3:
                ].tolist()
            assert got == expected, (got, expected)
    assert with_words(lines, "an engine trains its parameters", "copy of the model") == 1, lines
    engine.destroy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tokens_are_right_and_the_slow_way_is_said(workers: Any, stage: int, before: bool) -> None:
    workers(1).run(tokens_while_training, stage, before)
