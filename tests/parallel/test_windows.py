"""Windows hold what has not been run yet, and nothing else does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.engine.train_loop import TrainLoop


def held() -> list[tuple[int, int]]:
    """Of each window its length, and how many batches live when it comes to its last; on any number of ranks."""
    made, found = list[weakref.ref[torch.Tensor]](), list[tuple[int, int]]()

    def loader() -> Iterator[Any]:
        for _ in range(7):
            batch = torch.zeros(1, 2)
            made.append(weakref.ref(batch))
            yield batch

    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    with deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0] as engine:
        feeding = next(value for value in vars(engine).values() if isinstance(value, TrainLoop))
        for window in feeding.windows(loader(), "drop", None):
            for _ in range(len(window) - 1):  # the newest is what the loader's loop has at hand too
                next(window)
            found.append((len(window), sum(one() is not None for one in made)))
            assert len(list(window)) == 1
    return found


def test_a_window_lets_go_of_batches_as_they_are_run(workers: Any) -> None:
    assert workers(2).run(held) == [[(3, 1), (3, 1), (1, 1)]] * 2
