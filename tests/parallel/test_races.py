"""Random delays before every message, wait, service and hook change no bit of the parameters."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.cells import Cell, build_engine, masters
from tests.parity.models import batch

STEPS = 3
SCHEDULES = 25  # of each stage and number of ranks: 200 in all
FEW = 5
MARKS = ("reduce", "publish", "gather", "before a unit", "after a unit", "gradient")  # kinds of delayed places


class Delays:
    """Sleeps of one rank under one schedule, most of them none, some longer than a whole step."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(1000 * seed + dist.get_rank())
        self.labels: set[str] = set()

    def __call__(self, label: str) -> None:
        self.labels.add(label)
        draw = self._random.random()
        if draw < 0.2:
            time.sleep(self._random.random() * (0.02 if draw < 0.01 else 0.001))


def train(stage: int) -> dict[str, torch.Tensor]:
    """Masters after a few steps, many small messages in flight; four ranks are two shard groups of two."""
    ranks = dist.get_world_size()
    zero = (("overlap_comm", True), *([("mics_shard_size", 2)] if ranks == 4 else []))
    cell = Cell(stage, ranks, "fp32", 2, bucket=2000, optimizer="adamw", zero=zero)
    engine = build_engine(cell)
    for step in range(STEPS):
        for micro in range(cell.accumulation):
            engine.backward(engine(*batch(step, micro, dist.get_rank())))
            engine.step()
    values = masters(engine)
    engine.destroy()
    return values


def differing_schedules(stage: int, seeds: range) -> tuple[list[str], list[str]]:
    """Schedules whose parameters differ from those without delays, and the kinds of places that were delayed."""
    from deepspeed.comm.collectives import collectives

    wanted, found, labels = train(stage), [], set()
    for seed in seeds:
        collectives.PLANTED_DELAY = delays = Delays(seed)
        try:
            values = train(stage)
        finally:
            collectives.PLANTED_DELAY = None
        labels |= delays.labels
        changed = [name for name in wanted if not torch.equal(values[name], wanted[name])]
        found += [f"schedule {seed}: {', '.join(changed)}"] if changed else []
    return found, [mark for mark in MARKS if any(label.startswith(mark) for label in labels)]


def expected_marks(stage: int) -> set[str]:
    """The kinds of places that a stage has."""
    return (
        {"reduce", "gradient"}
        | ({"publish"} if stage in (1, 2) else set())
        | (set(MARKS[2:5]) if stage == 3 else set())
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, SCHEDULES), marks=pytest.mark.slow)], ids=["few", "rest"]
)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_delays_change_no_bit(workers: Any, stage: int, ranks: int, seeds: range) -> None:
    expect_no_difference(workers, stage, ranks, seeds)


@pytest.mark.parametrize(
    "seeds", [range(FEW), pytest.param(range(FEW, SCHEDULES), marks=pytest.mark.slow)], ids=["few", "rest"]
)
def test_delays_change_no_bit_under_hybrid_sharding(workers: Any, seeds: range) -> None:
    """Two kinds of waits, inside shard groups and across them, in orders that differ between ranks."""
    expect_no_difference(workers, 3, 4, seeds)


def expect_no_difference(workers: Any, stage: int, ranks: int, seeds: range) -> None:
    for rank, (found, marks) in enumerate(workers(ranks).run(differing_schedules, stage, seeds, timeout=120)):
        assert not found, f"rank {rank}: {found}"
        assert set(marks) >= expected_marks(stage), f"rank {rank} was delayed only at {marks}"
