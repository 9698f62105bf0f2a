"""Plans of pipelines: every stage is judged, the fullest one decides, and the schedule says how long they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepspeed.errors import ArgumentError
from deepspeed.pipe.schedule import make_schedule
from deepspeed.planner.mesh_options import MeshShape
from deepspeed.planner.search import Task, TrainingPlan, judge, search, simulated
from deepspeed.planner.step_time import StepTime, enough, schedule_of, window_time
from tests.unit.planner import toys
from tests.unit.planner.toys import ADAMW, TOKENS, WIDTH, Net, rows

MACHINE = replace(toys.MACHINE, ranks=2)
STAGED = MeshShape(stages=2)


class Row(Net):
    """Four blocks, and a loss of its own."""

    depth = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


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
    task, plan = Task(Row, rows, 32, ADAMW), TrainingPlan(0, "none", 4, 8, False, 0, STAGED)
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
    whole = judge(task, TrainingPlan(0, "none", 4, 4, False), MACHINE)
    assert whole.time is not None
    assert found.time.compute == pytest.approx(whole.time.compute, rel=0.25)  # twice the samples, half of the model
    assert found.time.update < 0.6 * whole.time.update


def test_a_schedule_that_cannot_be_had_says_so() -> None:
    config = {**ADAMW, "pipeline": {"schedule": "interleaved", "chunks": 2}}
    with pytest.raises(ArgumentError, match="the next count is 4"):
        schedule_of(config, 2, 3)
    found = judge(Task(Row, rows, 6, config), TrainingPlan(0, "none", 2, 3, False, 0, STAGED), MACHINE)
    assert "the next count is 4" in found.reason
    ring = simulated(Task(Row, rows, 8, config), TrainingPlan(0, "none", 2, 4, False, 0, STAGED), MACHINE)
    assert {each.memory.held for each in ring.stages} == {ring.memory.parameters // 2}


def test_the_search_compares_pipelines_by_micro_batch() -> None:
    """Larger ones wait longer for other stages, so the largest that fits is not all that is looked at."""
    told: list[TrainingPlan] = []
    staged = {"axes": True, "allowed": lambda plan: plan.shape == STAGED and not plan.recompute}
    found = search(Task(Row, rows, 16, ADAMW), MACHINE, report=lambda each: told.append(each.plan), **staged)
    assert [(plan.micro, plan.steps) for plan in told] == [(8, 2), (4, 4), (2, 8)]
    assert next(each for each in found if each.plan.micro == 1).reason.startswith("not looked at")
    own = Task(Row, rows, 16, {**ADAMW, "pipeline": {"stages": 2}})
    alone = search(own, MACHINE, axes=True, allowed=lambda plan: plan == TrainingPlan(0, "none", 8, 1, False))
    assert "has its own pipeline stages" in alone[0].reason
