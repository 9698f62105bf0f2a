"""Ranks that use modules differently, on the emulated device: the CPU's losses, or one error by name on every rank."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.zero.gradients.accumulation import Purpose
from deepspeed.zero.parameters import collective_order
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import observed

need_compiler()

WIDTH, DEPTH, STEPS = 8, 4, 3
Route = tuple[int, ...]  # blocks in the order in which a rank runs them
Schedule = tuple[tuple[Route, ...], ...]  # by step and rank


class Routed(nn.Module):
    """Blocks that each pass runs in an order of its own, or leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
        self.route: Route = tuple(range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.route:
            x = self.blocks[block](x)
        return x


def engine_of(stage: int, **zero: Any) -> Any:
    """An engine with a group per block."""
    import deepspeed

    torch.manual_seed(0)
    model = Routed()
    section = {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH + WIDTH, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": section | zero,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    # A full wire would stop the host here, before it comes to where ranks meet; with a GPU it goes on.
    wire = engine._components.reducer.reduce_scatter
    wire.settings = replace(wire.settings, in_flight=1 << 30)
    return engine


def one_step(engine: Any, route: Route, step: int) -> float:
    engine.module.route = route
    rank = torch.distributed.get_rank()
    loss = engine(torch.ones(2, WIDTH, device=engine.device) * (1 + rank + step)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def runs(cases: list[tuple[int, Schedule, dict[str, Any]]]) -> list[tuple[Any, list[str]]]:
    """For each case its losses, or the error's class and words; and what was reported."""
    found = []
    for stage, schedule, zero in cases:
        with observed() as seen:
            engine = engine_of(stage, **zero)
            outcome: Any
            try:
                rank = torch.distributed.get_rank()
                outcome = [one_step(engine, routes[rank], step) for step, routes in enumerate(schedule)]
            except RuntimeError as error:
                outcome = f"{type(error).__name__}: {error}"
                reducer = engine._components.reducer  # some ranks had sent rounds already: all meet, nothing is left
                with contextlib.suppress(UsageError):  # they stand at different places of the window
                    reducer.finish(Purpose.ZERO_GRAD)
                reducer.clear()
            engine.destroy()
        found.append((outcome, seen.reports))
    return found


def drawn(seed: int, most: int = 4) -> tuple[int, int, Schedule, dict[str, Any]]:
    """(ranks, stage, schedule, limits): blocks left out, exchanged, or run twice, on some ranks or on all."""
    draw = random.Random(seed)
    ranks, stage = min(most, draw.choice((2, 2, 3, 4))), draw.choice((0, 1, 2, 3, 3, 3))
    limits = draw.choice(({}, {"stage3_prefetch_bucket_size": 0}, {"stage3_max_live_parameters": 0}))

    def route() -> Route:
        order = list(range(DEPTH))
        for _ in range(draw.randrange(3)):
            change = draw.randrange(3)
            at, other = draw.randrange(len(order)), draw.randrange(len(order))
            if change == 0 and len(order) > 1:
                del order[at]
            elif change == 1:
                order[at], order[other] = order[other], order[at]
            else:
                order.insert(at, order[other])
        return tuple(order)

    def of_step() -> tuple[Route, ...]:
        if draw.random() < 0.6:
            return (route(),) * ranks
        return tuple(route() if draw.random() < 0.5 else tuple(range(DEPTH)) for _ in range(ranks))

    return ranks, stage, tuple(of_step() for _ in range(STEPS)), limits


def expect_equal_or_named(workers, emulated, seeds: Sequence[int], most: int = 4) -> tuple[int, int]:
    """Runs the schedules of these seeds; returns how many gave the CPU's losses, and how many the error."""
    equal, refused, by_ranks = 0, 0, {}
    for seed in seeds:
        ranks, *case = drawn(seed, most)
        by_ranks.setdefault(ranks, []).append(tuple(case))
    for ranks, cases in by_ranks.items():
        limit = LIMIT + 5.0 * len(cases)
        theirs, ours = (pool(ranks).run(runs, cases, timeout=limit) for pool in (workers, emulated))
        for number, (stage, schedule, _) in enumerate(cases):
            outcomes, expected = [rank[number][0] for rank in ours], [rank[number][0] for rank in theirs]
            assert [rank[number][1] for rank in ours] == [[]] * ranks
            if isinstance(outcomes[0], str):
                assert stage == 3 and any(len(set(routes)) > 1 for routes in schedule)
                assert set(outcomes) == {outcomes[0]} and outcomes[0].startswith("OrderError: "), outcomes
                assert all(f"rank {rank}" in outcomes[0] or f", {rank}" in outcomes[0] for rank in range(ranks))
                assert "blocks." in outcomes[0]
                refused += 1
            else:
                for losses, others in zip(outcomes, expected, strict=True):
                    assert losses == pytest.approx(others, rel=2e-6)
                equal += 1
    return equal, refused


def test_some_schedules_are_equal_or_refused_by_name(workers, emulated):
    equal, refused = expect_equal_or_named(workers, emulated, range(1000, 1010), most=2)
    assert equal and refused


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_200_schedules_are_equal_or_refused_by_name(workers, emulated, ranks):
    seeds = [seed for seed in range(200) if drawn(seed)[0] == ranks]
    equal, refused = expect_equal_or_named(workers, emulated, seeds)
    print(f"{ranks} ranks: {equal} equal, {refused} refused")
    assert equal and refused


def comparisons(zero: dict[str, Any]) -> list[int]:
    """Comparisons of gathers in each step: ten, four alike, one of another route, and four of the first again."""
    plain, other = tuple(range(DEPTH)), (0, 2, 1, 3)
    engine = engine_of(3, **zero)
    lockstep, found = engine._components.lifecycle.gather_order.lockstep, []
    for step, route in enumerate([plain] * 14 + [other] + [plain] * 4):
        before = lockstep.compared
        one_step(engine, route, step)
        found.append(lockstep.compared - before - 1)  # and one where ranks meet in `step`
    engine.destroy()
    return found


def test_gathers_are_compared_at_first_and_where_their_order_changes(emulated):
    for found in emulated(2).run(comparisons, {}, timeout=LIMIT):
        early, alike, after = found[: collective_order.STEPS], found[collective_order.STEPS : 14], found[14:]
        assert min(early) >= DEPTH and alike == [0] * 4
        assert sum(after) > 0 and after[-1] == 0  # what is gathered ahead follows the last pass


def test_gathers_are_compared_always_or_never_by_key(emulated):
    assert min(emulated(2).run(comparisons, {"stage3_check_order": True}, timeout=LIMIT)[0]) >= DEPTH
    assert emulated(2).run(comparisons, {"stage3_fixed_graph": True}, timeout=LIMIT)[0] == [0] * 19
