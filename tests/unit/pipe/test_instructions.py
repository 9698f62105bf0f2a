"""Schedules by the names of old scripts say what the rows say that an engine runs."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.errors import ArgumentError
from deepspeed.pipe.schedule import Action, PipelineSchedule
from deepspeed.pipe.schedule_simulator import simulate
from deepspeed.runtime.pipe import schedule as old

OPS = {
    old.RecvActivation: "<F", old.ForwardPass: "F", old.SendActivation: ">F",
    old.RecvGrad: "<B", old.BackwardPass: "B", old.SendGrad: ">B",
}  # fmt: skip


def row_of(instructions: list[Any]) -> tuple[Action, ...]:
    return tuple(Action(OPS[type(one)], one.micro_batch) for one in instructions if type(one) in OPS)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("kind", "name"), [(old.TrainSchedule, "1f1b"), (old.InferenceSchedule, "inference")])
@pytest.mark.parametrize(("stages", "micros"), [(1, 1), (2, 4), (4, 3), (4, 8)])
def test_instructions_of_all_stages_are_a_schedule_that_ends(kind: type, name: str, stages: int, micros: int) -> None:
    made = [kind(micros, stages, stage) for stage in range(stages)]
    everything = [[one for step in schedule for one in step] for schedule in made]
    simulate(PipelineSchedule(name, micros, 1, tuple(map(row_of, everything))))
    for stage, (schedule, done) in enumerate(zip(made, everything, strict=True)):
        assert all(sum(isinstance(one, old.ForwardPass | old.BackwardPass) for one in step) == 1 for step in schedule)
        loads = [one.micro_batch for one in done if isinstance(one, old.LoadMicroBatch)]
        assert loads == (list(range(micros)) if stage in (0, stages - 1) else [])
        ends = [type(one) for one in done if type(one) not in OPS and not isinstance(one, old.LoadMicroBatch)]
        wanted = [old.ReduceTiedGrads, old.ReduceGrads, old.OptimizerStep] if name == "1f1b" else []
        assert ends == wanted and done[len(done) - len(ends) :] == [kind() for kind in ends]


@pytest.mark.parametrize(("stages", "micros"), [(1, 3), (2, 4), (4, 8)])
def test_a_buffer_holds_one_micro_batch_at_a_time(stages: int, micros: int) -> None:
    for stage in range(stages):
        schedule, holds = old.TrainSchedule(micro_batches=micros, stages=stages, stage_id=stage), dict[int, int]()
        for one in (one for step in schedule.steps() for one in step if isinstance(one, old.BufferOpInstruction)):
            assert 0 <= one.buffer_id < schedule.num_pipe_buffers()
            if isinstance(one, old.ForwardPass):
                assert one.buffer_id not in holds
                holds[one.buffer_id] = one.micro_batch
            elif isinstance(one, old.BackwardPass):
                assert holds.pop(one.buffer_id) == one.micro_batch
        assert not holds


def test_what_scripts_ask_of_a_schedule() -> None:
    first, last = (old.TrainSchedule(4, 2, stage) for stage in (0, 1))
    assert first.is_first_stage and not first.is_last_stage and last.is_last_stage
    assert (last.stage, last.num_stages, last.num_micro_batches) == (1, 2, 4)
    text = repr(next(iter(first)))
    assert text.startswith("[LoadMicroBatch(buffer_id=0, micro_batch=0), ForwardPass(buffer_id=0, micro_batch=0)"), text
    alone = list(old.DataParallelSchedule(2, 1, 0))
    assert [[one.name for one in step] for step in alone] == [
        ["LoadMicroBatch", "ForwardPass", "BackwardPass"],
        ["LoadMicroBatch", "ForwardPass", "BackwardPass", "ReduceGrads", "OptimizerStep"],
    ]
    with pytest.raises(ArgumentError, match="stage_id is 2"):
        old.TrainSchedule(4, 2, 2)


def test_a_schedule_is_simulated_once_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.pipe import legacy_schedule

    calls = list[str]()

    def counted(name: str, function: Any) -> Any:
        return lambda *args: (calls.append(name), function(*args))[1]

    for name in ("simulate", "make_schedule"):
        monkeypatch.setattr(legacy_schedule, name, counted(name, getattr(legacy_schedule, name)))
    stages, micros = 3, 29  # asked for by no other test
    for stage in range(stages):
        assert sum(map(len, old.TrainSchedule(micros, stages, stage))) > 2 * micros
    assert sorted(calls) == ["make_schedule", "simulate"]
