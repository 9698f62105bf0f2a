"""Rounds whose messages carry no tags: none is left behind, none waits without need, and order costs little."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.zero.parameters.collective_order import LaunchOrder
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import observed

need_compiler()

WIDTH, DEPTH = 8, 3
BLOCK = WIDTH * WIDTH + WIDTH  # elements


class Blocks(nn.Module):
    """Linear blocks, one of which may be left out of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.skip: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != self.skip:
                x = torch.tanh(block(x))
        return x


def engine_of(stage: int, accumulation: int = 1, persist: int = 0) -> Any:
    """An engine with a group per block; at stage 3, parameters below `persist` elements stay whole."""
    import deepspeed

    torch.manual_seed(0)
    model = Blocks()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BLOCK,
            "stage3_param_persistence_threshold": persist,
        },
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def pass_through(engine: Any, skip: int | None, number: int) -> float:
    """A micro-batch without one of the blocks."""
    engine.module.skip = skip
    rank = torch.distributed.get_rank()
    loss = engine(torch.ones(2, WIDTH, device=engine.device) * (1 + rank + number)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def skipping(stage: int, skip: int) -> tuple[list[float], list[float], list[str]]:
    """Losses and norms of steps in which all ranks leave out a block, and what was reported."""
    with observed() as seen:
        engine, norms = engine_of(stage), []
        for number in range(3):
            seen.losses.append(pass_through(engine, skip, number))
            norms.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    return seen.losses, norms, seen.reports


@pytest.mark.drawn(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("skip", [0, DEPTH - 1])
def test_a_group_that_no_rank_uses_holds_nothing_back_for_good(workers, emulated, stage, skip):
    theirs = workers(2).run(skipping, stage, skip, timeout=LIMIT)
    ours = emulated(2).run(skipping, stage, skip, timeout=LIMIT)
    for (losses, norms, reports), (their_losses, their_norms, _) in zip(ours, theirs, strict=True):
        assert reports == [] and min(norms) > 0
        assert losses == pytest.approx(their_losses, rel=2e-6)
        assert norms == pytest.approx(their_norms, rel=2e-6)


def saved_in_the_window(stage: int, skip: int, folder: str) -> tuple[list[list[float]], list[list[float]]]:
    """Parameters after a window that went on behind a save, and after one that was loaded from it."""

    def values(engine: Any) -> list[list[float]]:
        pass_through(engine, None, 1)
        found = [engine.module.get_parameter(name) for name, _ in engine.module.named_parameters()]
        import deepspeed

        with deepspeed.zero.GatheredParameters(found):
            return [param.detach().cpu().flatten().tolist() for param in found]

    engine = engine_of(stage, accumulation=2)
    pass_through(engine, skip, 0)
    engine.save_checkpoint(folder, tag="window")
    gone_on = values(engine)
    engine.destroy()
    again = engine_of(stage, accumulation=2)
    again.load_checkpoint(folder, tag="window")
    resumed = values(again)
    again.destroy()
    return gone_on, resumed


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("skip", [0, DEPTH - 1])
def test_a_checkpoint_within_a_window_has_the_rounds_that_waited(emulated, stage, skip):
    folder = tempfile.mkdtemp()
    try:
        for gone_on, resumed in emulated(2).run(saved_in_the_window, stage, skip, folder, timeout=LIMIT):
            assert gone_on == resumed
    finally:
        shutil.rmtree(folder)


def waiting_at_each_gradient(stage: int, persist: int) -> tuple[int, list[tuple[str, list[str]]]]:
    """How many groups there are, and groups that are complete and wait, as each gradient has arrived."""
    engine, found = engine_of(stage, persist=persist), []
    reducer = engine._components.reducer

    def look(name: str) -> Any:
        def hook(_: torch.Tensor) -> None:
            found.append((name, [b.group.name for b in reducer.buckets if b.order.holds(b)]))

        return hook

    for name, param in engine.module.named_parameters():
        param.register_post_accumulate_grad_hook(look(name))
    for number in range(2):
        pass_through(engine, None, number)
    groups = len(reducer.buckets)
    engine.destroy()
    return groups, found


@pytest.mark.parametrize(("stage", "persist"), [(0, 0), (1, 0), (2, 0), (3, 0), (3, WIDTH + 1)])
def test_rounds_that_are_complete_in_the_order_of_backward_depart_at_once(emulated, stage, persist):
    for groups, found in emulated(2).run(waiting_at_each_gradient, stage, persist, timeout=LIMIT):
        assert groups >= DEPTH and len(found) == 2 * 2 * DEPTH
        assert [each for each in found if each[1]] == []


@dataclass(eq=False)
class Part:
    """What an order looks at in a bucket."""

    sum: int = 1


def seconds_per_round(count: int, used: slice) -> float:
    """Of windows in which the rounds of some of the groups are complete in the worst order."""
    parts = [Part() for _ in range(count)]
    sent: list[Part] = []
    order = LaunchOrder(parts, lambda part, _round, _number: sent.append(part))
    chosen = parts[used]
    best = float("inf")
    for _ in range(6):
        order.flush(parts)
        sent.clear()
        begin = time.thread_time()
        for part in chosen[::-1]:
            order.add((part, None, 0), usual=True)
        order.flush(chosen)
        best = min(best, time.thread_time() - begin)
        assert sent == chosen
    return best / len(chosen)


@pytest.mark.parametrize("used", [slice(None), slice(1, None, 2)], ids=["all", "half"])
def test_the_price_of_a_round_does_not_grow_with_their_number(used):
    assert seconds_per_round(4000, used) < 4 * seconds_per_round(200, used)
