"""Plans of pipelines: every stage is judged, the fullest one decides, and the schedule says how long they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.pipe.schedule import make_schedule
from deepspeed.planner.axes import Shape
from deepspeed.planner.clock import StepTime
from deepspeed.planner.plans import Plan, Task, judge, search, simulated
from deepspeed.planner.stages import enough, schedule_of, window_time
from deepspeed.simulator.machine import Machine

RATES = [[64, 1e10], [1024, 5e10]]
MACHINE = Machine(2, 1 << 30, {"fp32": RATES, "bf16": RATES}, 1e10, 1e-6, 1e9, shared=True)
ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
WIDTH, TOKENS = 64, 32
STAGED = Shape(stages=2)


class Block(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Row(nn.Module):
    """Four of them, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.example_input_array = torch.zeros(1, 3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, TOKENS, WIDTH)


@pytest.mark.parametrize("micros", [1, 4, 8])
def test_stages_that_take_equally_long_wait_for_those_before_them(micros: int) -> None:
    schedule, stages = make_schedule("1f1b", 4, micros), 4
    phases = [{"F0": 1.0, "B0": 2.0}] * stages
    rests = [StepTime(9.0, 0.5, 1.0 + stage, 0.0) for stage in range(stages)]
    found = window_time(schedule, phases, rests, 0.0, 0.25)
    assert found.compute == 3.0 * micros
    assert found.waiting == 3.0 * (stages - 1)
    assert (found.messages, found.update) == (0.75, 4.0)
    assert found.total == 3.0 * (micros + stages - 1) + 4.75
    # What is sent arrives later: once on the way through the stages and once back, and where a stage waits for it.
    assert window_time(schedule, phases, rests, 0.1, 0.0).waiting >= found.waiting + 2 * (stages - 1) * 0.1 - 1e-9


def test_a_plan_of_stages_is_that_of_its_fullest_one() -> None:
    task, plan = Task(Row, rows, 32, ADAMW), Plan(0, "none", 4, 8, False, 0, STAGED)
    run = simulated(task, plan, MACHINE)
    first, last = (each.memory for each in run.stages)
    assert run.steps == enough(schedule_of(run.config, 2, plan.steps)) == 4
    assert first.held == last.held == first.parameters // 2
    assert first.peak > last.peak  # it holds a micro-batch more
    assert run.crossing == 4 * TOKENS * WIDTH * 4
    found = judge(task, plan, MACHINE)
    assert found.memory == first and found.fits and found.time is not None
    tight = judge(task, plan, replace(MACHINE, memory=(first.peak + last.peak) // 2))
    assert not tight.fits and tight.reason.startswith("stage 0 needs")
    # Two stages that take equally long: the other one waits for one micro-batch of eight.
    assert found.time.waiting == pytest.approx(found.time.compute / plan.steps, rel=0.25)
    assert found.time.messages == 0  # nobody shares a stage
    whole = judge(task, Plan(0, "none", 4, 4, False), MACHINE)
    assert whole.time is not None
    assert found.time.compute == pytest.approx(whole.time.compute, rel=0.25)  # twice the samples, half of the model
    assert found.time.update < 0.6 * whole.time.update


def test_a_schedule_that_cannot_be_had_says_so() -> None:
    config = {**ADAMW, "pipeline": {"schedule": "interleaved", "chunks": 2}}
    with pytest.raises(ArgumentError, match="the next count is 4"):
        schedule_of(config, 2, 3)
    found = judge(Task(Row, rows, 6, config), Plan(0, "none", 2, 3, False, 0, STAGED), MACHINE)
    assert "the next count is 4" in found.reason
    ring = simulated(Task(Row, rows, 8, config), Plan(0, "none", 2, 4, False, 0, STAGED), MACHINE)
    assert {each.memory.held for each in ring.stages} == {ring.memory.parameters // 2}


def test_the_search_compares_pipelines_by_micro_batch() -> None:
    """Larger ones wait longer for other stages, so the largest that fits is not all that is looked at."""
    told: list[Plan] = []
    staged = {"axes": True, "allowed": lambda plan: plan.shape == STAGED and not plan.recompute}
    found = search(Task(Row, rows, 16, ADAMW), MACHINE, told=lambda each: told.append(each.plan), **staged)
    assert [(plan.micro, plan.steps) for plan in told] == [(8, 2), (4, 4), (2, 8)]
    assert next(each for each in found if each.plan.micro == 1).reason.startswith("not looked at")
    own = Task(Row, rows, 16, {**ADAMW, "pipeline": {"stages": 2}})
    alone = search(own, MACHINE, axes=True, allowed=lambda plan: plan == Plan(0, "none", 8, 1, False))
    assert "brings stages of its own" in alone[0].reason
