"""Generation through modules whose attention runs in the interpreted kernels: the tokens of `generate`, in fp32.

Passes without modules: `test_device_passes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.inference import Generator, SamplingParams  # noqa: E402
from deepspeed.inference.executors import attention_ways, select  # noqa: E402
from tests.kernels.interpreter import interpreted  # noqa: E402
from tests.unit.inference.toys import alone, llama, masked, prompts, scale  # noqa: E402

NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture
def kernels() -> Iterator[Any]:
    """Interpreted kernels as the only way, and no native passes."""
    launched = interpreted("paged_attention")
    ways: Any = [attention_ways.KernelWay(launched)]
    with (
        mock.patch.object(attention_ways, "ways_of", lambda _: (ways, "")),
        mock.patch.object(select, "_fused", lambda executor, *_: executor),
    ):
        yield launched


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=256, hidden_size=96, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return scale(Qwen2ForCausalLM(config))


MODELS = {
    "Llama": llama, "Qwen2": qwen2, **{k: lambda k=k: masked(k) for k in ("Mistral", "GptOss", "Gemma2", "Llama4Text")},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_without_kernels(kernels: Any, family: str) -> None:
    model, texts = MODELS[family](), prompts((3, 40))
    wanted = [alone(model, prompt, NEW) for prompt in texts]
    generator = Generator(model, max_batch_tokens=24, page_size=16, speculation=3, cache_bytes=1 << 20)
    assert generator.kind == "packed" and len(generator._executor.ways) == model.config.num_hidden_layers
    launches = len(kernels.launches)
    assert generator.generate(texts, GREEDY) == wanted
    assert len(kernels.launches) > launches
    shapes = {layer.shape for _, layer in generator._executor.ways.values()}
    windowed = {"Llama4Text": "chunk", "Mistral": "window", "GptOss": "window", "Gemma2": "window"}.get(family)
    assert windowed is None or 9 in {getattr(shape, windowed) for shape in shapes}


def test_a_kernel_that_is_wrong_is_not_used(kernels: Any) -> None:
    broken = mock.Mock(wraps=kernels)
    broken.launch = lambda variant, grid, arguments: arguments[3].zero_()
    lines: list[str] = []
    with (
        mock.patch.object(attention_ways, "ways_of", lambda _: ([attention_ways.KernelWay(broken)], "")),
        mock.patch.object(select, "warn_once", lines.append),
    ):
        generator = Generator(llama(), cache_bytes=1 << 20)
    assert generator._executor.ways == {} and "since on the pages it fails: logits of mixed rows" in lines[-1]


def emulated_tokens() -> tuple[list[list[int]], int, list[str]]:
    """Tokens on the emulated device, launches of kernels, and reports of its detector."""
    from tests.emulated.runs import observed

    launched = interpreted("paged_attention")
    ways: Any = [attention_ways.KernelWay(launched)]
    with mock.patch.object(attention_ways, "ways_of", lambda _: (ways, "")), observed() as seen:
        generator = Generator(llama().to("cuda"), page_size=16, cache_bytes=1 << 18)
        assert len(generator._executor.ways) == generator.model.config.num_hidden_layers
        tokens = generator.generate(prompts((3, 20)), GREEDY)
        generator.close()
    return tokens, len(launched.launches), seen.reports


@pytest.mark.slow
def test_tokens_on_the_emulated_device_are_the_cpus(emulated: Any) -> None:
    tokens, launches, reports = emulated(1).run(emulated_tokens, timeout=100.0)[0]
    assert tokens == [alone(llama(), prompt, NEW) for prompt in prompts((3, 20))]
    assert launches > 0 and reports == []
