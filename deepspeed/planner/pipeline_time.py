"""Predicts the time of a pipeline's update from the traces of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.pipe.schedule import PipelineSchedule, make_schedule
from deepspeed.pipe.schedule_simulator import simulate
from deepspeed.planner.step_time import StepTime, first_touches
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.replay import replay
from deepspeed.simulator.trace import MARK, MESSAGE, Recording

_LONGEST = 2  # micro-batches for each stage: with more of them a stage holds no more, but for `gpipe`


def schedule_of(config: Any, stages: int, micros: int) -> PipelineSchedule:
    """What the stages would do.

    Args:
        config: the JSON.
        stages: how many.
        micros: micro-batches of a window.

    Raises:
        ArgumentError: the schedule that the JSON asks for cannot be had with so many.
    """
    block = DeepSpeedConfig.for_init(config).top.pipeline
    name = "interleaved" if block.chunks > 1 and block.schedule == "1f1b" else block.schedule
    return make_schedule(name, stages, micros, block.chunks)


def enough(schedule: PipelineSchedule) -> int:
    """Micro-batches in which a stage holds as much as in the whole window."""
    return schedule.micros if schedule.name == "gpipe" else min(schedule.micros, _LONGEST * schedule.stages)


def seconds_of_phases(recording: Recording, machine: Machine) -> dict[str, float]:
    """What one forward (`F0` of chunk 0), one backward (`B0`), … of a stage takes, without messages.

    Args:
        recording: of a stage, marked by its phases.
        machine: where.
    """
    found = first_touches(recording, machine)
    counts = Counter(entry.name for entry in recording.entries if entry.kind == MARK)
    clock = 0.0
    for piece in replay(recording, machine).pieces:
        if piece.kind != MESSAGE:
            found[piece.where] = found.get(piece.where, 0.0) + max(0.0, piece.end - max(clock, piece.begin))
        clock = max(clock, piece.end)
    return {where: seconds / counts[where] for where, seconds in found.items() if counts[where]}


def window_time(
    schedule: PipelineSchedule, phases: Sequence[dict[str, float]], rests: Sequence[StepTime], way: float, shared: float
) -> StepTime:
    """Time of an update over all stages.

    Args:
        schedule: of the window.
        phases: of each stage, as `seconds_of_phases` gives them.
        rests: of each stage: what it does behind the window (its `compute` is not read).
        way: seconds that a message between stages is under way.
        shared: seconds in which stages sum gradients of what several of them hold.
    """
    each = [[phases[part % schedule.stages].get(f"{op}{part // schedule.stages}", 0.0) for op in "FBW"]
            for part in range(schedule.parts)]  # fmt: skip
    costs = [(one[0], one[1], one[2]) for one in each]
    busy = [schedule.micros * sum(map(sum, costs[stage :: schedule.stages])) for stage in range(schedule.stages)]
    took = simulate(schedule, costs, way=way).time
    last = max(rests, key=lambda rest: replace(rest, compute=0.0).total)
    return replace(last, compute=max(busy), messages=last.messages + shared, waiting=took - max(busy))


def way_of(nbytes: int, machine: Machine, ranks: range) -> float:
    """Seconds that a message between two stages is under way, beside the copy that its sender has recorded.

    Args:
        nbytes: of its tensors.
        machine: where; ranks that share memory read it where it lies.
        ranks: the first ones of the stages.
    """
    on_link, besides = machine.message("send", float(nbytes), (ranks[0], ranks[1]))
    return besides if machine.shared else on_link + besides
