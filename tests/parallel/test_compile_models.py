"""torch.compile of twelve models at every stage, beside torch's own compilation of the bare model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.compiled import LATE, WAYS, closing_inductor, run, run_bare
from tests.parallel.test_compile import FREEING, Stack, settings
from tests.parallel.test_compile import loss_of as loss_of_stack

RANKS, LENGTH = 2, 12
TEXT = {
    "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "qwen2": "Qwen2ForCausalLM", "opt": "OPTForCausalLM",
    "gemma": "GemmaForCausalLM", "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration", "mixtral": "MixtralForCausalLM",
}  # fmt: skip
MODELS = [*TEXT, "vit", "conv", "lora", "stack"]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x))))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(3)))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        pooled = self.blocks(self.stem(pixel_values)).mean((2, 3))
        return (nn.functional.cross_entropy(self.head(pooled), labels),)


def text_model(name: str) -> Any:
    import transformers

    from tests import zoo

    kind = getattr(transformers, TEXT[name])
    config = next(zoo.configs(TEXT[name]))()
    config.use_cache = False
    return kind(config)


def make(name: str) -> Callable[[], nn.Module]:
    def build() -> Any:
        torch.manual_seed(0)
        if name in TEXT:
            return text_model(name)
        if name == "lora":
            from peft import LoraConfig, get_peft_model

            return get_peft_model(text_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        if name == "vit":
            from transformers import ViTConfig, ViTForImageClassification

            sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            more = {"intermediate_size": 64, "image_size": 8, "patch_size": 4, "num_labels": 4}
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return ViTForImageClassification(ViTConfig(**sizes, **more, **off))
        return Conv()

    return Stack if name == "stack" else build


def loss_function(name: str) -> Callable[[Any, int, int], torch.Tensor]:
    if name == "stack":
        return loss_of_stack

    def loss_of(call: Any, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        if name in ("vit", "conv"):
            images = torch.randn(2, 3, 8, 8, generator=generator)
            outputs = call(pixel_values=images, labels=torch.randint(4, (2,), generator=generator))
        else:
            ids = torch.randint(3, 64, (2, LENGTH), generator=generator)
            outputs = call(input_ids=ids, labels=ids)
        loss: torch.Tensor = outputs[0]
        return loss

    return loss_of


def cell(name: str, stages: list[int], ways: list[str], backend: str) -> None:
    build, loss_of = make(name), loss_function(name)
    bare = run_bare(build, loss_of, backend)
    for stage in stages:
        for limits in ({}, FREEING) if stage == 3 else ({},):
            config = settings(stage, zero_optimization=limits)
            eager = run(build, loss_of, config)
            for way in ways:
                seen, at = run(build, loss_of, config, way, backend), (name, stage, way, limits)
                assert seen.breaks <= bare.breaks, (at, seen.breaks, bare.breaks)
                assert 0 < seen.graphs[1] == seen.graphs[-1] or bare.graphs[1] < bare.graphs[-1], (at, seen.graphs)
                assert seen.near(eager), (at, seen.losses, eager.losses)


def inductor_cell(name: str, stage: int) -> None:
    with closing_inductor():
        cell(name, [stage], [*LATE][:1], "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_models(workers: Any, name: str, stage: int) -> None:
    workers(RANKS).run(cell, name, [stage], ["engine"], "aot_eager", timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "bert", "conv"])
def test_ways(workers: Any, name: str, stage: int) -> None:
    workers(RANKS).run(
        cell, name, [stage], [way for way in WAYS if way not in ("engine", "regions")], "eager", timeout=600
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "conv"])
def test_inductor(workers: Any, name: str, stage: int) -> None:
    workers(RANKS).run(inductor_cell, name, stage, timeout=900)
