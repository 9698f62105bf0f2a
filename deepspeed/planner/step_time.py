"""Predicts the time of a step, and of a pipeline's update: replays recorded traces on a machine.

CPU ranks share cores and memory, so messages overlap with nothing; the disk, and a device's link to its host, overlap
with the update, and the longest of them counts.
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
        compute: forward and backward of the window.
        messages: gathers, reductions, publishes.
        update: the optimizer's.
        disk: reads and writes.
        link: copies between host and device.
        waiting: for other stages of a pipeline, on the busiest one.
    """

    compute: float
    messages: float
    update: float
    disk: float
    link: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        """Seconds."""
        return self.compute + self.waiting + self.messages + max(self.update, self.disk, self.link)

    @property
    def limit(self) -> str:
        """What takes most."""
        parts = {name: getattr(self, name) for name in ("compute", "waiting", "messages", "update", "disk", "link")}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class UpdateTraffic:
    """What an update moves that is no operator of a recorded step.

    Args:
        messages: bytes that a rank receives.
        update: bytes of host memory that the optimizer reads and writes.
        disk: bytes that are read and written on it.
        link: bytes that go from the device to its host, or back; the way with more of them counts.
        group: ranks that those messages travel between; (): all of the machine.
    """

    messages: float
    update: float
    disk: float = 0.0
    link: float = 0.0
    group: tuple[int, ...] = ()


@contextmanager
def recorded(recording: Recording) -> Iterator[Callable[[str], None]]:
    """Inside a simulation, a step is written down: its operators, and the messages in the middle of them. What it gives
    names what follows."""
    lanes: dict[tuple[int, ...], int] = {}
    recording.entries.clear()  # of a run that went no further for want of another stage's
    recording.blocks.clear()
    with StepRecorder(recording) as recorder:

        def hear(name: str, nbytes: int, ranks: tuple[int, ...]) -> None:
            lane = lanes.setdefault(ranks, len(lanes) + 1)
            recorder.add(HostEvent(MESSAGE, name, recorder.current(), nbytes=nbytes, group=ranks, lane=lane))
            recorder.order(len(recording.entries) - 1)  # what follows reads it

        with listening(hear):
            yield recorder.mark


def step_time(
    recording: Recording,
    share: float,
    updates: int,
    machine: Machine,
    moved: UpdateTraffic,
) -> StepTime:
    """Replay a step.

    Args:
        recording: some updates of some micro-batches; what is marked `STEP` is an update's, and not a micro-batch's.
        share: of the micro-batches in it that an update takes.
        updates: that are recorded.
        machine: where.
        moved: in an update besides.
    """
    replayed = replay(recording, machine)
    own = sum(each.end - each.begin for each in replayed.pieces if each.where == STEP and each.kind == KERNEL)
    touches = first_touches(recording, machine)
    new_of_update = touches.pop(STEP, 0.0)
    new = sum(touches.values())
    inside = replayed.exposed(MESSAGE)  # what travels in the middle of forward and backward
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
    """Seconds that blocks of memory cost because they are new, by the mark under which they came: the C library has the
    system provide the larger ones each time, page by page. What was there before, and what stays (states that the first
    update makes), costs nothing in the updates to come."""
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
    """How often all parameters are reduced in an update, and how often gathered."""
    reductions = micro_batches if policy.reduces_as_gradients_arrive else 1
    gathers = 2 * micro_batches if policy.gathers_before_use else 1  # else sums are shared, or values published, once
    return reductions, gathers


# -- of a pipeline ----------------------------------------------------------------------------------------------------


_LONGEST = 2  # micro-batches for each stage: with more of them a stage holds no more, but for `gpipe`


def schedule_of(config: Any, stages: int, micros: int) -> PipelineSchedule:
    """The schedule of a JSON, with so many stages and micro-batches.

    Raises:
        ArgumentError: the schedule cannot be had with so many.
    """
    block = DeepSpeedConfig.for_init(config).top.pipeline
    name = "interleaved" if block.chunks > 1 and block.schedule == "1f1b" else block.schedule
    return make_schedule(name, stages, micros, block.chunks)


def enough(schedule: PipelineSchedule) -> int:
    """Micro-batches in which a stage holds as much as in the whole window."""
    return schedule.micros if schedule.name == "gpipe" else min(schedule.micros, _LONGEST * schedule.stages)


def seconds_of_phases(recording: Recording, machine: Machine) -> dict[str, float]:
    """Seconds of one forward (`F0` of chunk 0), one backward (`B0`), … of a stage whose phases are marked in its
    recording; messages do not count."""
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
    costs = [(forward, backward, weights) for forward, backward, weights in each]
    busy = [schedule.micros * sum(map(sum, costs[stage :: schedule.stages])) for stage in range(schedule.stages)]
    took = simulate(schedule, costs, way=way).time
    last = max(rests, key=lambda rest: replace(rest, compute=0.0).total)
    return replace(last, compute=max(busy), messages=last.messages + shared, waiting=took - max(busy))
