"""Edits, loads and forwards under random delays are those of one process, bit for bit.

At stage 3 a rank that is late in an earlier forward still pulls slices, one-sidedly, while the others go on to an edit.
Values are small integers, so every sum is exact and one plain process gives the bits that all ranks must give.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from tests.parallel.tiny import sgd, start

WIDTH, OPERATIONS = 6, 12
SCHEDULES, FEW = range(200), range(7, 11)
KINDS = ("forward", "train", "train", "evaluate", "full", "full", "local", "gathered", "load", "read", "away")
LIMITS: tuple[dict[str, int], ...] = (
    {},  # two groups
    {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
    {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 10**9},
)


class Net(nn.Module):
    """Five units; exact on small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
        self.out = nn.Linear(WIDTH, 3)
        fill(self, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def whole_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def fill(model: nn.Module, seed: int) -> None:
    for index, param in enumerate(model.parameters()):
        param.data.copy_(whole_numbers(1000 * seed + index, *param.shape))


def program(seed: int) -> list[tuple[str, int]]:
    """(kind, number that says which parameter and which values); the same on every rank."""
    draw = random.Random(seed)
    return [(draw.choice(KINDS), draw.randrange(1, 10**6)) for _ in range(OPERATIONS)]


def planted(seed: int) -> Any:
    """Delays of one rank: most ranks are fast, some are late somewhere."""
    draw = random.Random(1000 * seed + dist.get_rank())

    def delay(label: str) -> None:
        if draw.random() < 0.12:
            time.sleep(draw.random() * 0.012)

    return delay


def chosen(model: nn.Module, number: int) -> tuple[nn.Parameter, torch.Tensor]:
    params = list(model.parameters())
    param = params[number % len(params)]
    return param, whole_numbers(number, *param.shape)


def local_part(param: Any, value: torch.Tensor) -> torch.Tensor:
    """What this rank sets of `value`: where its fragment lies."""
    if safe_get_local_fp32_param(param) is None:
        return value.new_empty(0)
    member = param._ds_member
    (fragment,) = member.owner.fragments[member.uid]
    return value.reshape(-1)[fragment.range.start : fragment.range.stop]


def edit(engine: Any, kind: str, number: int) -> None:
    param, value = chosen(engine.module, number)
    if kind == "full":
        safe_set_full_fp32_param(param, value)
    elif kind == "local":
        safe_set_local_fp32_param(param, local_part(param, value))
    elif kind == "gathered":
        first = number % dist.get_world_size()
        with deepspeed.zero.GatheredParameters(param, modifier_rank=first), torch.no_grad():
            if dist.get_rank() == first:
                param.copy_(value)
    elif kind == "load":
        other = Net()
        fill(other, number)
        engine.load_module_state_dict(other.state_dict())
    else:
        engine.offload_states()
        engine.reload_states()


def run_engine(engine: Any, operations: list[tuple[str, int]]) -> list[torch.Tensor]:
    """What the forwards and reads of this rank give."""
    seen = []
    for kind, number in operations:
        x = whole_numbers(number + dist.get_rank(), 2, WIDTH)
        if kind == "evaluate":
            engine.eval()
            with torch.no_grad():
                seen.append(engine(x))
            engine.train()
        elif kind == "read":
            seen.append(safe_get_full_fp32_param(chosen(engine.module, number)[0]))
        elif kind in ("forward", "train"):
            made = engine(x)
            seen.append(made.detach().clone())
            if kind == "train":
                engine.backward(made.sum())
                engine.step()  # with a learning rate of 0: the slices get their next version, and no other values
            else:
                engine.zero_grad()
        else:
            edit(engine, kind, number)
    return seen


def run_plain(operations: list[tuple[str, int]], rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same in one process."""
    model, seen = Net().to(dtype), []
    for kind, number in operations:
        if kind == "read":
            seen.append(chosen(model, number)[0].detach().float().clone())
        elif kind in ("forward", "train", "evaluate"):
            seen.append(model(whole_numbers(number + rank, 2, WIDTH).to(dtype)).detach())
        elif kind == "load":
            fill(model, number)
        elif kind != "away":
            param, value = chosen(model, number)
            param.data.copy_(value)
    return seen


@contextmanager
def by_messages(wanted: bool) -> Iterator[None]:
    """Inside, slices are asked for over sockets although the ranks share memory."""
    from deepspeed.comm.shared_memory.transport import SharedMemory

    before = SharedMemory.can_serve
    if wanted:
        SharedMemory.can_serve = lambda *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        SharedMemory.can_serve = before  # type: ignore[method-assign]


def differing(seeds: range) -> list[str]:
    from deepspeed.comm.collectives import collectives

    wrong = []
    for seed in seeds:
        operations, model = program(seed), Net()
        precision = "bf16" if seed % 5 == 4 else "fp32"  # with masters apart from the slices; the values are exact
        settings: dict[str, Any] = {"zero": LIMITS[seed % 3], "precision": precision}
        with by_messages(seed % 2 == 1), start(3, model, lambda p: sgd(p, lr=0.0), **settings) as engine:
            collectives.PLANTED_DELAY = planted(seed)
            try:
                ours = run_engine(engine, operations)
            finally:
                collectives.PLANTED_DELAY = None
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        wanted = run_plain(operations, dist.get_rank(), dtype)
        bad = [at for at, (a, b) in enumerate(zip(ours, wanted, strict=True)) if not torch.equal(a, b)]
        wrong += [f"schedule {seed}: outputs {bad} of {operations}"] if bad else []
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_read_is_of_its_own_order(workers: Any, ranks: int) -> None:
    for rank, wrong in enumerate(workers(ranks).run(differing, FEW, timeout=120)):
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_read_is_of_its_own_order_in_all_schedules(workers: Any, ranks: int) -> None:
    for rank, wrong in enumerate(workers(ranks).run(differing, SCHEDULES, timeout=1800)):
        assert not wrong, f"rank {rank}: {wrong}"
