"""Experts that are modules of their own, and a parameter that all of them share: divided as packed ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import utils
from deepspeed.moe.expert_parallel import DividedExperts
from tests.parallel.test_experts import settings

WIDTH, EXPERTS, STEPS = 8, 4, 3


class Separate(nn.ModuleDict):
    """As Switch Transformers has them, with a scale of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        for expert in range(EXPERTS):
            inner = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH, bias=False))
            self[f"expert_{expert}"] = inner
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            row, choice = (index == expert).nonzero(as_tuple=True)
            result = self[f"expert_{expert}"](hidden[row]) * self.scale * weights[row, choice, None]
            out = out.index_add(0, row, result)
        return out


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router, self.experts, self.out = nn.Linear(WIDTH, EXPERTS), Separate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.out(x + self.experts(x, index, weights)).square().mean()


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6 + 3 * rank, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def in_one_process(world: int, steps: int = STEPS, model: nn.Module | None = None) -> nn.Module:
    model = model or Net()
    optimizer = adamw(model.parameters())
    for step in range(steps):
        for rank in range(world):
            (model(tokens(rank, step)) / world).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(tokens(dist.get_rank(), step)))
        engine.step()


def gap(engine: Any, dense: nn.Module) -> float:
    whole = dict(dense.named_parameters())
    return max(
        float((utils.safe_get_full_fp32_param(param) - whole[name]).detach().abs().max())
        for name, param in engine.module.named_parameters()
    )


def trains(stage: int, ep: int) -> float:
    model = Net(seed=dist.get_rank())  # the values of rank 0 count
    names = len(list(model.parameters()))
    optimizer = adamw(model.parameters())  # has the experts of all ranks
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage, ep))
    assert isinstance(model.experts, DividedExperts)
    assert len(list(model.parameters())) == names - 3 * (EXPERTS - EXPERTS // ep)
    train(engine, 0, STEPS)
    apart = gap(engine, in_one_process(dist.get_world_size()))
    engine.destroy()
    return apart


@pytest.mark.parametrize(("stage", "world", "ep"), [(1, 2, 2), (3, 4, 2)])
def test_training_is_that_of_the_whole_model(workers: Any, stage: int, world: int, ep: int) -> None:
    assert max(workers(world).run(trains, stage, ep, timeout=120)) <= 1e-6


def another_size(folder: str, stage: int) -> float:
    dense = in_one_process(dist.get_world_size())
    engine, *_ = deepspeed.initialize(model=Net(), optimizer=adamw, config=settings(stage, 2))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    if stage < 3:
        whole = engine.module.state_dict()
        assert set(whole) == set(dense.state_dict())
        engine.module.load_state_dict(whole)
    engine.destroy()
    engine, *_ = deepspeed.initialize(model=Net(seed=4), optimizer=adamw, config=settings(stage, 1))
    engine.load_checkpoint(folder)
    train(engine, 2, STEPS)
    apart = gap(engine, dense)
    engine.destroy()
    return apart


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_and_a_state_dict_have_every_expert(workers: Any, tmp_path: Path, stage: int) -> None:
    assert max(workers(2).run(another_size, str(tmp_path), stage, timeout=120)) <= 1e-6


class Stacked(nn.Module):
    """Experts along dim 0 of a parameter, which another layer may have, too."""

    def __init__(self, up: nn.Parameter) -> None:
        super().__init__()
        self.num_experts, self.up = EXPERTS, up

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("th,tkhw->tkw", hidden, self.up[index]).tanh() * weights.unsqueeze(-1)).sum(1)


class Tied(Net):
    """Two layers with the same experts, as DiffusionGemma's encoder and decoder."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.experts, self.again = Stacked(up), Stacked(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        x = x + self.experts(x, index, weights)
        return self.out(x + self.again(x, index.roll(1, 0), weights)).square().mean()


def tied(stage: int) -> float:
    engine, *_ = deepspeed.initialize(model=Tied(), optimizer=adamw, config=settings(stage, 2))
    assert engine.module.experts.up is engine.module.again.up and engine.module.again.up.shape[0] != EXPERTS
    train(engine, 0, STEPS)
    if stage < 3:
        assert engine.module.state_dict()["again.up"].shape[0] == EXPERTS
    apart = gap(engine, in_one_process(dist.get_world_size(), model=Tied()))
    engine.destroy()
    return apart


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_layers_with_the_same_experts(workers: Any, stage: int) -> None:
    assert max(workers(2).run(tied, stage, timeout=120)) <= 1e-6
