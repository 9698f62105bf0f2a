"""Predicts the time of a step: replays its recorded trace on a machine.

Ranks of a CPU share its cores and its memory, so messages hide behind nothing; the disk, and a device's link to its
host, work beside the update, and what is longest counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deepspeed.foundation.fake_mode import STEP, listening
from deepspeed.planner.train_program import MICRO_BATCH
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.replay import replay
from deepspeed.simulator.trace import COPY, DISK, HOST, KERNEL, MESSAGE, WAIT, HostEvent, Recording
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
    sizes: dict[int, tuple[int, str]] = {}
    seconds: dict[str, float] = defaultdict(float)
    for block in recording.blocks:
        known, where = sizes.get(block.number, (0, _mark_of(recording, block.at)))
        if block.nbytes == 0:
            sizes.pop(block.number, None)
            seconds[where] += machine.first_touch(known)
        elif block.new or known:
            sizes[block.number] = max(block.nbytes, known), where
    return seconds


def _mark_of(recording: Recording, at: int) -> str:
    return recording.entries[at].where if at < len(recording.entries) else MICRO_BATCH


def moves(policy: Policy, micro_batches: int) -> tuple[int, int]:
    """How often all parameters are reduced in an update, and how often gathered.

    Args:
        policy: what is split.
        micro_batches: of a window.
    """
    reductions = micro_batches if policy.reduces_as_gradients_arrive else 1
    gathers = 2 * micro_batches if policy.gathers_before_use else 1  # else sums are shared, or values published, once
    return reductions, gathers
