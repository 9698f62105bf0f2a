"""Ranks that take different branches of a model, while backward waits for each reduction (`overlap_comm` false)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.harness.pool import PATIENCE

RANKS, WIDTH, STEPS, DEPTH = 2, 64, 1, 6
WAIT = 4.0  # seconds of waiting in a backward at most


class Branches(nn.Module):
    """One branch by rank, of several layers, then a layer that all ranks use; each layer is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))) for _ in range(RANKS)
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.last(torch.tanh(self.branches[branch](x))).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def expected() -> dict[str, torch.Tensor]:
    """Weights after the same updates in one process."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        for rank in range(RANKS):
            (model(batch(step, rank), rank) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def train(stage: int) -> None:
    model = Branches()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": WIDTH * (WIDTH + 1)},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank, started = dist.get_rank(), time.monotonic()
    for step in range(STEPS):
        engine.backward(engine(batch(step, rank), rank))
        engine.step()
    assert time.monotonic() - started < STEPS * 2 * WAIT * PATIENCE, "a wait for each bucket of the branch"
    for name, value in expected().items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_rank_waits_for_a_branch_that_another_rank_did_not_take(workers: Any, stage: int) -> None:
    workers(RANKS).run(train, stage, timeout=90)
