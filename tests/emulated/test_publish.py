"""New values travel while the rest of the update runs, on the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepspeed.zero.gradients.reduce_scatter import GradReduceScatter
from deepspeed.zero.optimizer import update
from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import observed
from tests.emulated.test_seen_wrong import one_step

need_compiler()


def cut(cell: Cell, piece: int, traced: bool) -> runs.Seen:
    """A cell whose update is cut into pieces of so many elements."""
    before, update.PIECE = update.PIECE, piece
    try:
        return one_step(cell, traced=True) if traced else runs.train(cell)
    finally:
        update.PIECE = before


@pytest.mark.parametrize(
    "cell",
    [
        Cell(stage=2, ranks=2, dtype="bf16", small_buckets=True, own_stream=True),
        pytest.param(Cell(stage=1, ranks=4, dtype="fp16", small_buckets=True, accumulation=2), marks=pytest.mark.slow),
        pytest.param(Cell(stage=2, ranks=4, small_buckets=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_in_pieces_is_the_same_update(emulated, cell):
    whole, pieces = (emulated(cell.ranks).run(cut, cell, piece, False, timeout=LIMIT) for piece in (1 << 30, 500))
    for one, other in zip(whole, pieces, strict=True):
        assert one.losses == other.losses and other.reports == []


@pytest.mark.parametrize(("piece", "beside"), [(500, True), (1 << 30, False)])
def test_what_is_updated_travels_beside_the_rest_of_the_update(emulated, piece, beside):
    cell = Cell(stage=2, ranks=2, small_buckets=True)
    for seen in emulated(2).run(cut, cell, piece, True, timeout=LIMIT):
        names = [what for what, *_ in seen.trace]
        last_update = max(at for at, name in enumerate(names) if "addcdiv" in name or "adam" in name)
        first_message = min(at for at, name in enumerate(names) if name.startswith("nccl all_gather"))
        assert (first_message < last_update) == beside and len(seen.waits) <= 1


def watched_steps(piece: int) -> tuple[int, int, list[float]]:
    """Steps that a wrapper of `optimizer.step` sees of one update, hooks' calls in it, and learning rates after it."""
    import deepspeed
    from tests.parallel.tiny import tiny

    model, calls, before = tiny(), [0, 0], update.PIECE
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = {"stage": 2, "reduce_bucket_size": 40}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine, inner, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    step = optimizer.step

    def counted(*args: object) -> object:
        calls[0] += 1
        return step(*args)

    def slower(one: torch.optim.Optimizer, *_: object) -> None:
        calls[1] += 1
        one.param_groups[0]["lr"] = 0.25

    optimizer.step = counted
    handle = register_optimizer_step_pre_hook(slower)
    update.PIECE = piece
    try:
        engine.backward(engine(torch.ones(2, 6, device=engine.device)).sum())
        engine.step()
    finally:
        update.PIECE = before
        handle.remove()
    engine.destroy()
    return calls[0], calls[1], [group["lr"] for group in optimizer.param_groups]


def test_who_looks_at_steps_sees_one(emulated):
    assert emulated(2).run(watched_steps, 10, timeout=LIMIT) == [(1, 1, [0.25])] * 2


def emptied(optimizer: str, tier: str) -> int:
    """How often three steps give free memory back to the device."""
    import deepspeed
    from tests.parallel.tiny import tiny

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2} | ({"offload_optimizer": {"device": tier}} if tier else {}),
    }
    model = tiny()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    with observed() as seen:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 6, device=engine.device)).sum())
            engine.step()
    engine.destroy()
    return seen.counters.get("empty_cache", 0)


@pytest.mark.parametrize(("optimizer", "tier", "times"), [("AdamW", "", 1), ("SGD", "", 1), ("AdamW", "cpu", 0)])
def test_optimizer_state_gets_memory_of_its_own_once(emulated, optimizer, tier, times):
    assert emulated(1).run(emptied, optimizer, tier, timeout=LIMIT) == [times]


def shares_and_takes() -> list[str]:
    """In which order a step of stage 0 sends sums to everybody, and takes in what others have sent."""
    found: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        plain = getattr(GradReduceScatter, name)

        def call(*args: Any) -> Any:
            found.append(name)
            return plain(*args)

        return call

    engine = runs.engine_of(Cell(stage=0, ranks=2, dtype="bf16", small_buckets=True))
    for step in range(2):
        ids, targets = (part.to(engine.device) for part in runs.batch(step, 0, torch.distributed.get_rank()))
        engine.backward(engine(ids, targets))
        with (
            mock.patch.object(GradReduceScatter, "_share", noted("_share")),
            mock.patch.object(GradReduceScatter, "_take", noted("_take")),
        ):
            engine.step()
    engine.destroy()
    return found


def test_stage_0_sends_all_its_sums_before_it_takes_any_in(emulated):
    for found in emulated(2).run(shares_and_takes, timeout=LIMIT):
        assert found.count("_take") >= 4, "one bucket in flight shows no order"
        half = len(found) // 2
        for step in (found[:half], found[half:]):
            assert "_share" not in step[step.index("_take") :], step
