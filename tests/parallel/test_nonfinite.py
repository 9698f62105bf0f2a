"""Forty plants of values that are not finite: the finder names direction, module and rank; nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.pool import WorkerPool
from tests.parallel.tiny import masters, rows, said, start

Workers = Callable[[int], WorkerPool]
RANKS, WIDTH = 2, 6
WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda x: x * float("nan"),
    "infinity": lambda x: x / 0.0,
    "logarithm": lambda x: (x * 0.0).log() + x,
    "root": lambda x: (-x.abs() - 1.0).sqrt(),
}


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * float("inf")


WAYS["backward"] = _Bad.apply


class Block(nn.Module):
    """A masked attention over the rows and a layer; may be broken."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, way: str = "") -> torch.Tensor:
        n = x.shape[0]
        mask = torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)
        scores = (x @ x.mT).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf) + mask
        x = x + scores.softmax(-1) @ self.linear(self.norm(x)).to(x.dtype)
        return WAYS[way](x) if way else x


class Model(nn.Module):
    """Three blocks, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(WIDTH, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, loss: bool = True, ways: tuple[str, ...] = ("", "", "")) -> torch.Tensor:
        self.calls += 1
        for layer, way in zip(self.layers, ways, strict=True):
            x = layer(x, way)
        out = self.out(self.drop(x))
        return out.square().mean() if loss else out


class Breaking(torch.optim.SGD):
    """Writes NaN into one element after the second update."""

    where, updates = -1, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.updates += 1
        if self.updates == 2 and self.where >= 0:
            leaves = [leaf for group in self.param_groups for leaf in group["params"] if leaf.numel()]
            leaves[self.where % len(leaves)].view(-1)[0] = float("nan")
        return result


def run(stage: int, direction: str, block: int, way: str, whose: int | None, folder: str, outside: bool = False) -> Any:
    """What the finder says of a fault planted in the third window; the plant is taken away after it."""
    here = whose is None or whose == dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    optimizer = Breaking(model.parameters(), lr=0.01)
    if direction == "update" and here:
        optimizer.where = 2 * block
    section = {"enabled": True, "output_path": folder}
    zero = {"reduce_bucket_size": 40}
    bf16 = {"enabled": outside, "check_grad_overflow": outside}  # then the update is skipped
    settings: dict[str, Any] = {"accumulation": 2, "non_finite": section, "zero": zero, "bf16": bf16}
    with said() as lines, start(stage, model, optimizer, **settings) as engine:
        finder = engine._instruments._finder
        for window in range(3 if direction != "backward" or not outside else 4):
            for micro in range(2):
                x = rows(10 * window + micro, dist.get_rank(), 4)
                planted = here and window >= 2 and micro == 1
                ways = ["", "", ""]
                if planted and direction == "input":
                    x[0, 0] = float("nan")
                elif planted and direction in ("forward", "backward"):
                    ways[block] = way if direction == "forward" else "backward"
                loss = engine(x, not outside, ways=tuple(ways))
                if outside:
                    loss = loss.square().mean()
                engine.backward(loss)
                if micro == 1 and window < 2:
                    assert finder.found is None
                engine.step()
        calls = int(model.calls)
        del loss
        return finder.found, calls, len(lines)


def check(found: str, direction: str, block: int, whose: int | None) -> bool:
    words = {"input": "in input, tensor 0", "update": "in update, parameter '"}
    module = words.get(direction, f"in {direction}, layers.{block} (Block) by aten.")
    return module in found and (direction == "update" or f"rank {whose or 0}, micro-batch 1" in found)


def plants() -> list[tuple[int, str, int, str, int | None]]:
    """Forty: (stage, direction, block, way, rank)."""
    stages, blocks, ranks = itertools.cycle(range(4)), itertools.cycle(range(3)), itertools.cycle([0, 1, None, 1, 0])
    found = []
    for direction, count in (("input", 6), ("forward", 16), ("backward", 12), ("update", 6)):
        for _, way in zip(range(count), itertools.cycle(list(WAYS)[:4]), strict=False):
            found.append((next(stages), direction, next(blocks), way, next(ranks)))
    return found


def find(workers: Workers, folder: Path, stage: int, direction: str, block: int, way: str, whose: int | None) -> None:
    told = workers(RANKS).run(run, stage, direction, block, way, whose, str(folder), timeout=60)
    assert told[0] == told[1] or [t[0] for t in told] == [told[0][0]] * 2
    found, calls, _ = told[0]
    assert check(found, direction, block, whose), (stage, direction, block, way, whose, found)
    assert calls == 6  # what the replay did to buffers is undone
    (dump,) = folder.glob("*.pt")
    assert torch.load(dump)["where"] == found and torch.load(dump)["inputs"]
    assert direction == "update" or f"_rank{whose or 0}.pt" in dump.name


@pytest.mark.parametrize("plant", [plants()[at] for at in (1, 7, 12, 26, 37)], ids=str)
def test_a_plant_is_named(workers: Workers, tmp_path: Path, plant: tuple[int, str, int, str, int | None]) -> None:
    find(workers, tmp_path, *plant)


@pytest.mark.slow
@pytest.mark.parametrize("plant", plants(), ids=str)
def test_forty_plants_are_named(workers: Workers, tmp_path: Path, plant: Any) -> None:
    find(workers, tmp_path, *plant)


def test_where_the_loss_is_outside_backward_is_looked_at_the_next_time(workers: Workers, tmp_path: Path) -> None:
    for stage in (0, 3):
        told = workers(RANKS).run(run, stage, "backward", 1, "", 1, str(tmp_path), True)
        assert check(told[0][0], "backward", 1, 1) and "update 3" in told[0][0], told


def untouched(stage: int, enabled: bool) -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(0)
    model = Model()
    with start(stage, model, accumulation=2, non_finite={"enabled": enabled}) as engine:
        torch.manual_seed(1)
        for step in range(4):
            x = rows(step, dist.get_rank(), 4)
            if step == 1:
                x[0, 0] = float("inf")
            engine.backward(engine(x))
            if step == 1:
                engine.zero_grad()
            engine.step()
        return masters(engine), float(torch.rand(()))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_what_is_trained_stays_the_same(workers: Workers, stage: int) -> None:
    with_, without = (workers(RANKS).run(untouched, stage, on)[0] for on in (True, False))
    assert with_[1] == without[1]
    assert all(
        torch.equal(
            with_[0][name],
            value,
        )
        or not value.isfinite().all()
        for name, value in without[0].items()
    )
