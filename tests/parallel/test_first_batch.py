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


@pytest.mark.parametrize(("samples", "times"), [(8, 1), (4, 0)])
def test_a_rank_that_gets_the_batch_of_all_is_told(workers: Any, samples: int, times: int) -> None:
    workers(2).run(batches_of, samples, times)
