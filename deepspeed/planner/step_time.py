"""Prediction of the time of a step, and of a pipeline's update: replays recorded traces on a machine.

CPU ranks share cores and memory, so their messages overlap with nothing. The disk, and a device's link to its host,
overlap with the optimizer update; only the longest of the three counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.foundation.fake_mode import STEP, listening
from deepspeed.pipe.schedule import PipelineSchedule, make_schedule
from deepspeed.pipe.schedule_simulator import simulate
from deepspeed.planner.train_program import MICRO_BATCH
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.replay import replay
from deepspeed.simulator.trace import COPY, DISK, HOST, KERNEL, MARK, MESSAGE, WAIT, HostEvent, Recording
from deepspeed.simulator.trace_recorder import StepRecorder
from deepspeed.zero.layout.stages import Policy


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update on one rank.

    Args:
        compute: forward and backward of all micro-batches.
        messages: collectives and messages between ranks.
        update: optimizer update.
        disk: reads and writes.
        link: copies between host and device.
        waiting: waiting for other pipeline stages, on the busiest stage.
    """

    compute: float
    messages: float
    update: float
    disk: float
    link: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the update; `update`, `disk` and `link` overlap."""
        return self.compute + self.waiting + self.messages + max(self.update, self.disk, self.link)

    @property
    def limit(self) -> str:
        """Return the name of the longest part."""
        parts = {name: getattr(self, name) for name in ("compute", "waiting", "messages", "update", "disk", "link")}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class UpdateTraffic:
    """Traffic of an update outside of the recorded operators.

    Args:
        messages: bytes that a rank receives.
        update: bytes of host memory that the optimizer reads and writes.
        disk: bytes that are read from and written to the disk.
        link: bytes between device and host, in the direction with more bytes.
        group: ranks that exchange the messages; (): all ranks of the machine.
    """

    messages: float
    update: float
    disk: float = 0.0
    link: float = 0.0
    group: tuple[int, ...] = ()


@contextmanager
def recorded(recording: Recording) -> Iterator[Callable[[str], None]]:
    """Record a simulated step into `recording`, emptied first; the yielded function marks the start of a phase."""
    lanes: dict[tuple[int, ...], int] = {}
    recording.entries.clear()  # entries of a run that stopped because a message of another stage was unknown
    recording.blocks.clear()
    with StepRecorder(recording) as recorder:

        def hear(name: str, nbytes: int, ranks: tuple[int, ...]) -> None:
            lane = lanes.setdefault(ranks, len(lanes) + 1)
            recorder.add(HostEvent(MESSAGE, name, recorder.current(), nbytes=nbytes, group=ranks, lane=lane))
            recorder.order(len(recording.entries) - 1)  # later entries read the message

        with listening(hear):
            yield recorder.mark


def step_time(
    recording: Recording,
    share: float,
    updates: int,
    machine: Machine,
    moved: UpdateTraffic,
) -> StepTime:
    """Predict the time of an update by replaying a recording.

    Args:
        recording: recording of several updates; operations marked `STEP` belong to an update, not to a micro-batch.
        share: micro-batches of one update / recorded micro-batches.
        updates: number of recorded updates.
        machine: machine for the replay.
        moved: further traffic of an update.
    """
    replayed = replay(recording, machine)
    own = sum(each.end - each.begin for each in replayed.pieces if each.where == STEP and each.kind == KERNEL)
    touches = first_touches(recording, machine)
    new_of_update = touches.pop(STEP, 0.0)
    new = sum(touches.values())
    inside = replayed.exposed(MESSAGE)  # messages within forward and backward
    group = moved.group or tuple(range(machine.ranks))
    whole = moved.messages * len(group) / max(1, len(group) - 1)
    rest = [
        HostEvent(MESSAGE, "all_gather", nbytes=whole, group=group),
        HostEvent(DISK, "state", nbytes=moved.disk),
        HostEvent(COPY, "to_host", stream=1, nbytes=moved.link),
        HostEvent(HOST, "update", nbytes=moved.update),
        HostEvent(WAIT, "state", after=1),
    ]
    parts = replay(Recording("update", 0, machine.ranks, rest), machine)
    took = {piece.name: piece.end - piece.begin for piece in parts.pieces}
    copied = took["to_host"] if moved.link else 0.0
    update = max(took["update"], own / updates) + new_of_update / updates
    return StepTime((replayed.seconds - inside - own + new) * share, took["all_gather"] + inside * share, update,
                    took["state"], copied)  # fmt: skip


def first_touches(recording: Recording, machine: Machine) -> dict[str, float]:
    """Return the seconds of page faults in newly allocated blocks, by phase: the C library maps large blocks anew at
    each allocation. Blocks from before the recording, and blocks that are not freed (state of the first update), cost
    nothing in later updates."""
    entries, sizes = recording.entries, dict[int, tuple[int, str]]()
    seconds: dict[str, float] = defaultdict(float)
    for block in recording.blocks:
        mark = entries[block.position].where if block.position < len(entries) else MICRO_BATCH
        known, where = sizes.get(block.number, (0, mark))
        if block.nbytes == 0:
            sizes.pop(block.number, None)
            seconds[where] += machine.first_touch(known)
        elif block.new or known:
            sizes[block.number] = max(block.nbytes, known), where
    return seconds


def moves(policy: Policy, micro_batches: int) -> tuple[int, int]:
    """Return how often an update of `micro_batches` micro-batches reduces all gradients and gathers all parameters."""
    reductions = micro_batches if policy.reduces_as_gradients_arrive else 1
    gathers = 2 * micro_batches if policy.gathers_before_use else 1  # else updated values are published once
    return reductions, gathers


# -- of a pipeline ----------------------------------------------------------------------------------------------------


_LONGEST = 2  # micro-batches per stage; more of them need no more memory, except with `gpipe`


def schedule_of(config: Any, stages: int, micros: int) -> PipelineSchedule:
    """Return the configured pipeline schedule for `stages` stages and `micros` micro-batches.

    Raises:
        ArgumentError: the schedule does not support these numbers.
        DeepSpeedConfigError: the configuration is invalid.
    """
    block = DeepSpeedConfig.for_init(config).top.pipeline
    name = "interleaved" if block.chunks > 1 and block.schedule == "1f1b" else block.schedule
    return make_schedule(name, stages, micros, block.chunks)


def enough(schedule: PipelineSchedule) -> int:
    """Return the number of micro-batches after which a stage has reached its peak memory."""
    return schedule.micros if schedule.name == "gpipe" else min(schedule.micros, _LONGEST * schedule.stages)


def seconds_of_phases(recording: Recording, machine: Machine) -> dict[str, float]:
    """Return the mean seconds of each phase of a stage, such as one forward (`F0` of chunk 0) or one backward (`B0`).

    The phases are marked in the recording; messages do not count.
    """
    totals = first_touches(recording, machine)
    counts = Counter(entry.name for entry in recording.entries if entry.kind == MARK)
    clock = 0.0
    for piece in replay(recording, machine).pieces:
        if piece.kind != MESSAGE:
            totals[piece.where] = totals.get(piece.where, 0.0) + max(0.0, piece.end - max(clock, piece.begin))
        clock = max(clock, piece.end)
    return {where: seconds / counts[where] for where, seconds in totals.items() if counts[where]}


def window_time(
    schedule: PipelineSchedule, phases: Sequence[dict[str, float]], rests: Sequence[StepTime], way: float, shared: float
) -> StepTime:
    """Return the time of an update over all stages.

    Args:
        schedule: schedule of the micro-batches.
        phases: results of `seconds_of_phases` for each stage.
        rests: results of `step_time` for each stage; `compute` is ignored.
        way: seconds of a message between stages.
        shared: seconds to sum the gradients of parameters that several stages share.
    """
    each = [[phases[part % schedule.stages].get(f"{op}{part // schedule.stages}", 0.0) for op in "FBW"]
            for part in range(schedule.parts)]  # fmt: skip
    costs = [(forward, backward, weights) for forward, backward, weights in each]
    busy = [schedule.micros * sum(map(sum, costs[stage :: schedule.stages])) for stage in range(schedule.stages)]
    took = simulate(schedule, costs, way=way).time
    last = max(rests, key=lambda rest: replace(rest, compute=0.0).total)
    return replace(last, compute=max(busy), messages=last.messages + shared, waiting=took - max(busy))
