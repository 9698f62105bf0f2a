"""What an engine says of the first batch that it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.tiny import said, with_words


def batches_of(samples: int, times: int) -> None:
    import deepspeed

    model = torch.nn.Linear(3, 2)
    settings = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with (
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0] as engine,
        said() as lines,
    ):
        for _ in range(2):
            engine.backward(engine(torch.ones(samples, 3)).sum())
            engine.step()
    if dist.get_rank() == 0:
        assert with_words(lines, "forward got 8 samples", "DistributedSampler") == times, lines


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("samples", "times"), [(8, 1), (4, 0)])
def test_a_rank_that_gets_the_batch_of_all_is_told(workers: Any, samples: int, times: int) -> None:
    workers(2).run(batches_of, samples, times)


def first_batches(same: bool, tp: int, value: float | None, times: int) -> None:
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model.example_input_array = torch.ones(2, 4)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": tp},
    }
    data = dist.get_rank() // tp  # ranks that share matrices get the same
    draw = torch.Generator().manual_seed(0 if same else data)
    with (
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0] as engine,
        said() as lines,
    ):
        for step in range(4):
            batch = torch.randn(2, 4, generator=draw) if value is None else torch.full((2, 4), value)
            if step == 2:  # one batch that is equal everywhere, later, is no fault
                batch = torch.ones(2, 4) * torch.arange(4.0)
            engine.backward(engine(batch).sum())
            engine.step()
    if dist.get_rank() == 0:
        assert with_words(lines, "got equal first batches", "DistributedSampler") == times, lines


@pytest.mark.parametrize(
    ("same", "value", "times"),
    [(True, None, 1), (False, None, 0), (True, 1.0, 0)],
    ids=["equal", "different", "one value throughout"],
)
def test_ranks_that_get_equal_micro_batches_are_told(workers: Any, same: bool, value: float | None, times: int) -> None:
    workers(2).run(first_batches, same, 1, value, times)


def test_ranks_that_share_matrices_get_equal_batches_and_are_not_told(workers: Any) -> None:
    workers(2).run(first_batches, True, 2, None, 0)
