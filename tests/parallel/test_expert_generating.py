"""Text of models whose experts are divided: tokens of the whole model, and no rank waits for one that has ended."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import NotAvailableError
from deepspeed.inference import Generator
from tests.parallel.test_experts import settings
from tests.parallel.tiny import raises
from tests.unit.inference.toys import mixture

NEW = 14


def given(rank: int) -> dict[str, torch.Tensor]:
    """Prompts of other numbers and lengths on each rank, padded on the left."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 256, (1 + rank, 4 + 5 * rank), generator=generator)
    mask = torch.ones_like(ids)
    if rank:
        ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def texts(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 1000, **options})


def generated(family: str, stage: int) -> list[str]:
    """What differs from the whole model."""
    rank, whole = dist.get_rank(), mixture(family)
    inputs = given(rank)
    early = int(texts(whole, given(0))[0, 6])  # ends the text of rank 0 after a few tokens
    wanted = {
        "equal numbers": texts(whole, inputs),
        "an end": texts(whole, inputs, eos_token_id=early),
        "other lengths": texts(whole, inputs, max_new_tokens=3 + 4 * rank),
        "beams": texts(whole, inputs, num_beams=2, max_new_tokens=4 + rank),
        "no cache": texts(whole, inputs, use_cache=False, max_new_tokens=3 + rank),
    }
    config = settings(stage, 2, optimizer={"type": "AdamW"})
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(whole), config=config)
    engine.eval()
    found = {
        "equal numbers": texts(engine, inputs),
        "an end": texts(engine.module, inputs, eos_token_id=early),
        "other lengths": texts(engine, inputs, max_new_tokens=3 + 4 * rank),
        "beams": texts(engine, inputs, num_beams=2, max_new_tokens=4 + rank),
        "no cache": texts(engine, inputs, use_cache=False, max_new_tokens=3 + rank, synced_gpus=False),  # of a trainer
    }
    with raises(NotAvailableError, "divided among ranks", "generate()"):
        Generator(engine.module)
    with raises(NotAvailableError, "cache_implementation", "static"):
        engine.generate(**inputs, max_new_tokens=2, cache_implementation="static")
    engine.destroy()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize(
    ("family", "stage"),
    [("Mixtral", 0), pytest.param("Qwen3Moe", 3, marks=pytest.mark.slow), *(
        pytest.param("Mixtral", stage, marks=pytest.mark.slow) for stage in (1, 2, 3)
    )],
)  # fmt: skip
def test_an_engine_generates_what_the_whole_model_does(workers: Any, family: str, stage: int) -> None:
    assert workers(2).run(generated, family, stage, timeout=120) == [[], []]


def prepared(inject: bool) -> list[str]:
    rank, whole = dist.get_rank(), mixture("Mixtral")
    inputs = given(rank)
    wanted = texts(whole, inputs, max_new_tokens=3 + 4 * rank)
    engine, *_ = deepspeed.initialize(model=whole, config=settings(0, 2, optimizer={"type": "AdamW"}))
    module = engine.module
    ready = deepspeed.init_inference(module, dtype=torch.float32, replace_with_kernel_inject=inject)
    found = texts(ready, inputs, max_new_tokens=3 + 4 * rank)
    ready.destroy()
    engine.destroy()
    return [] if torch.equal(found, wanted) else ["tokens differ"]


@pytest.mark.slow
@pytest.mark.parametrize("inject", [False, True])
def test_init_inference_of_a_divided_model(workers: Any, inject: bool) -> None:
    assert workers(2).run(prepared, inject, timeout=120) == [[], []]


def sliced() -> bool:
    whole = mixture("Mixtral")
    config = settings(1, 2, optimizer={"type": "AdamW"}, tensor_parallel={"autotp_size": 2})
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(whole), config=config)
    engine.eval()
    data = engine._state.axes.data.rank
    same = torch.equal(texts(engine, given(data)), texts(whole, given(data)))
    engine.destroy()
    return same


def test_an_engine_with_slices_generates_too(workers: Any) -> None:
    assert workers(4).run(sliced, timeout=120) == [True] * 4
