"""Memory that generation by an engine in training takes beside the engine's own state: the peak of the resident set."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.malloc import own_pages
from deepspeed.inference.sampling_params import SamplingParams

LAYERS, WIDTH, VOCABULARY, NEW = 4, 768, 256, 12
UNIT = 4 * WIDTH * WIDTH + 3 * WIDTH * 2048 + 2 * WIDTH  # parameters of a layer
LIMITS = {"stage3_max_live_parameters": UNIT, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
MIB = 1 << 20


def model_of(lora: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2048, num_hidden_layers=LAYERS,
            num_attention_heads=WIDTH // 64, max_position_embeddings=128, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return model


def resident(which: str) -> int:
    """Bytes of the resident set: now ("VmRSS") or its peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def train(engine: Any) -> None:
    ids = torch.randint(1, VOCABULARY, (1, 8))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def peaks(stage: int, dtype: str, pinned: bool, lora: bool) -> list[tuple[str, int, int, int]]:
    """(call, bytes of the peak above what was resident before, bytes of pages, most parameters gathered at once)."""
    model = model_of(lora)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": stage} | (LIMITS if stage == 3 else {}),
            "hybrid_engine": {"enabled": True, "pin_parameters": pinned},
        },
    )
    prompts = [torch.randint(1, VOCABULARY, (20 + row + dist.get_rank(),)).tolist() for row in range(4)]
    ids = torch.tensor([prompt[:20] for prompt in prompts])
    sampling = SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=1)
    train(engine)
    engine.rollout([[1, 2, 3]], SamplingParams(max_new_tokens=1))  # imports, and the choice of the executor
    figures = []
    for call in ("rollout", "rollout after an update", "generate", "score"):
        train(engine)
        gc.collect()
        get_accelerator().empty_cache()
        if stage == 3:
            engine._components.lifecycle.prefetcher.peak = 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        with own_pages():  # without it, blocks of a layer leave gaps in the heap, which later ones may not fill
            if call == "generate":
                engine.generate(ids, max_new_tokens=NEW, do_sample=False)
            elif call == "score":
                engine.score(prompts)
            else:
                engine.rollout(prompts, sampling)
        size = 2 * LAYERS * WIDTH * (2 if dtype == "bf16" else 4)  # keys and values of a token
        pages = len(prompts) * 3 * 16 * size
        figures.append((call, resident("VmHWM") - before, pages, engine.zero_report()["peak"]))
    engine.destroy()
    return figures


CELLS = [
    *((stage, dtype, False, lora) for stage in (0, 2) for dtype in ("fp32", "bf16") for lora in (False, True)),
    *((3, dtype, pinned, False) for dtype in ("fp32", "bf16") for pinned in (False, True)),
]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("stage", "dtype", "pinned", "lora"), CELLS)
def test_generation_takes_its_pages_and_what_it_gathers(
    workers: Any, stage: int, dtype: str, pinned: bool, lora: bool
) -> None:
    """Stages 0 to 2: no copy, within 2 % of the weights; stage 3: one unit, or with the key the whole model."""
    weights = (LAYERS * UNIT + 2 * VOCABULARY * WIDTH) * (2 if dtype == "bf16" else 4)
    gathered = 0 if stage < 3 else weights if pinned else weights // LAYERS
    room = 0.02 * weights if stage < 3 else 4 * MIB  # rows of a pass, and gaps of the heap
    for rank, figures in enumerate(workers(2).run(peaks, stage, dtype, pinned, lora, timeout=300)):
        for call, peak, pages, elements in figures:
            said = (
                f"rank {rank}, {call}: peak {peak / MIB:.1f} MiB, pages {pages / MIB:.1f}, weights {weights / MIB:.1f}"
            )
            print(said)
            assert stage < 3 or pinned or 0 < elements <= UNIT + 64, elements
            assert peak <= gathered + pages + room, said
