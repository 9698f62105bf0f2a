"""Simulator of schedules: detects deadlocks, checks that each micro-batch runs once, and computes the cost."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.errors import PipelineError
from deepspeed.pipe.schedule import INFERENCE, Action, PipelineSchedule

FORWARD, BACKWARD = 1.0, 2.0  # default costs of a part
WEIGHTS = 1.0  # cost of `W`, included in BACKWARD
Cost = float | tuple[float, ...]  # a multiple of these, or (forward, backward[, weights])


@dataclass(frozen=True)
class ScheduleCost:
    """Time and memory of a schedule.

    Args:
        time: time at which all stages have finished, in the unit of the costs.
        peaks: by stage, the maximum number of (micro-batch, chunk) activations in memory.
        idle: idle fraction of the time of all stages (the pipeline bubble).
        put_off: by stage, the number of activations at its peak that only wait for `W`.
        begins: by stage, the start time of each action.
    """

    time: float
    peaks: tuple[int, ...]
    idle: float
    put_off: tuple[int, ...]
    begins: tuple[tuple[float, ...], ...]


class _Stage:
    """Simulated state of one stage."""

    def __init__(self) -> None:
        self.position, self.clock, self.busy = 0, 0.0, 0.0
        self.held: set[tuple[int, int]] = set()
        self.put_off: set[tuple[int, int]] = set()
        self.peak: tuple[int, int] = (0, 0)  # maximum of both counts together, and the first count at that time
        self.begins: list[float] = []  # start time of each action so far
        self.done: Counter[tuple[str, int, int]] = Counter()
        self.taken: set[tuple[str, int, int]] = set()


class _Simulation:
    def __init__(self, schedule: PipelineSchedule, costs: Sequence[Cost], way: float = 0.0) -> None:
        self.way = way
        self.schedule, later = schedule, WEIGHTS if schedule.splits else 0.0
        unit = (FORWARD, BACKWARD - later, later)
        each = [cost if isinstance(cost, tuple) else [cost * part for part in unit] for cost in costs]
        self.costs = [dict(zip("FBW", cost, strict=False)) for cost in each]
        self.stages = [_Stage() for _ in schedule.rows]
        self.in_flight: dict[tuple[int, int, str], deque[tuple[Action, float]]] = defaultdict(deque)

    def run(self) -> None:
        """Advance all stages to their ends; PipelineError for a deadlock or an invalid action."""
        moved = True
        while moved:
            moved = False
            for index, stage in enumerate(self.stages):
                while stage.position < len(self.schedule.rows[index]):
                    clock = stage.clock
                    if not self._act(index, self.schedule.rows[index][stage.position]):
                        break
                    stage.begins.append(clock)
                    stage.position, moved = stage.position + 1, True
        waiting = [index for index, stage in enumerate(self.stages) if stage.position < len(self.schedule.rows[index])]
        if waiting:
            raise PipelineError(f"the schedule never ends: {'; '.join(map(self._waits, waiting))}")

    def _peer(self, index: int, action: Action) -> tuple[int, int]:
        """Return the (stage, chunk) at the other end of a message; PipelineError if there is none."""
        onward = 1 if action.op in (">F", "<B") else -1
        part = self.schedule.part(index, action.chunk) + onward
        if not 0 <= part < self.schedule.parts:
            what = "takes" if action.op[0] == "<" else "sends"
            raise PipelineError(f"stage {index}: {action} {what} what no other part of the model has to do with")
        chunk, stage = divmod(part, self.schedule.stages)
        return stage, chunk

    def _act(self, index: int, action: Action) -> bool:
        """Perform an action; return False for a receive before its send; PipelineError for a wrong order."""
        stage, kind = self.stages[index], action.op[-1]
        if action.op[0] == ">":
            if not stage.done[kind, action.micro, action.chunk]:
                raise PipelineError(f"stage {index}: {action} sends what has not been computed (order swapped)")
            peer, chunk = self._peer(index, action)
            self.in_flight[index, peer, kind].append((Action(kind, action.micro, chunk), stage.clock + self.way))
            if self.schedule.name == INFERENCE:  # no backward needs the activations
                stage.held.discard((action.micro, action.chunk))
        elif action.op[0] == "<":
            peer, _ = self._peer(index, action)
            queue = self.in_flight[peer, index, kind]
            if not queue:
                return False
            sent, when = queue.popleft()
            if (sent.micro, sent.chunk) != (action.micro, action.chunk):
                raise PipelineError(f"stage {index}: {action} would take {sent}, which stage {peer} has sent before it")
            stage.clock = max(stage.clock, when)
            stage.taken.add((kind, action.micro, action.chunk))
        else:
            self._compute(index, stage, action)
        return True

    def _compute(self, index: int, stage: _Stage, action: Action) -> None:
        part = self.schedule.part(index, action.chunk)
        if not (0 <= action.micro < self.schedule.micros and 0 <= action.chunk < self.schedule.chunks):
            raise PipelineError(f"stage {index}: {action} is none of the schedule's micro-batches and chunks")
        key = (action.op, action.micro, action.chunk)
        stage.done[key] += 1
        if stage.done[key] > 1:
            raise PipelineError(f"stage {index}: {action} is computed twice")
        end = 0 if action.op == "F" else self.schedule.parts - 1
        if action.op != "W" and part != end and key not in stage.taken:
            raise PipelineError(f"stage {index}: {action} without <{action}: what it needs was not taken")
        self._hold(index, stage, action)
        cost = self.costs[part].get(action.op, 0.0)
        stage.clock, stage.busy = stage.clock + cost, stage.busy + cost

    def _hold(self, index: int, stage: _Stage, action: Action) -> None:
        """Update the activations in memory, and their peak, for an action; PipelineError for a wrong order."""
        place = (action.micro, action.chunk)
        if action.op == "B" and place not in stage.held:
            raise PipelineError(f"stage {index}: {action} before its forward (order swapped)")
        if action.op == "W" and place not in stage.put_off:
            raise PipelineError(f"stage {index}: {action} before its backward (order swapped)")
        if action.op == "F":
            stage.held.add(place)
        elif action.op == "B":
            stage.held.remove(place)
            if self.schedule.splits:
                stage.put_off.add(place)
        else:
            stage.put_off.remove(place)
        stage.peak = max(stage.peak, (len(stage.held) + len(stage.put_off), len(stage.held)))
        if self.schedule.name == INFERENCE and self.schedule.part(index, action.chunk) == self.schedule.parts - 1:
            stage.held.discard(place)  # the outputs are results: there is no message after which they are dropped

    def _waits(self, index: int) -> str:
        action = self.schedule.rows[index][self.stages[index].position]
        peer, chunk = self._peer(index, action)
        sent = Action(">" + action.op[-1], action.micro, chunk)
        rest = self.schedule.rows[peer][self.stages[peer].position :]
        never = "is to send it later" if sent in rest else f"never sends it ({sent})"
        return f"stage {index} waits for {action} of stage {peer}, which {never}"

    def count(self) -> None:
        """Raise PipelineError unless everything was computed, and every sent message was received."""
        ops = "F" if self.schedule.name == INFERENCE else "FBW" if self.schedule.splits else "FB"
        wanted = [
            (op, micro, chunk)
            for op in ops
            for micro in range(self.schedule.micros)
            for chunk in range(self.schedule.chunks)
        ]
        for index, stage in enumerate(self.stages):
            for key in wanted:
                if not stage.done[key]:
                    raise PipelineError(f"stage {index} never computes {Action(*key)}")
        for (source, target, _), queue in self.in_flight.items():
            if queue:
                raise PipelineError(f"stage {target} never takes {queue[0][0]}, which stage {source} sends")


def simulate(
    schedule: PipelineSchedule, costs: Sequence[Cost] = (), beside: Sequence[float] = (), way: float = 0.0
) -> ScheduleCost:
    """Simulate a schedule and return its cost.

    Args:
        schedule: the schedule of all stages.
        costs: cost of each part: a multiple of `FORWARD` and `BACKWARD`, or (forward, backward[, weights]) in any unit;
            without weights, these cost nothing; empty: all parts cost 1.
        beside: extra time of each stage after the schedule (such as the update), in the same unit; empty: none.
        way: transfer time of a message, in the same unit; the sender does not wait.

    Raises:
        PipelineError: a deadlock, a message that its peer does not expect, or a micro-batch that is not computed
            exactly once; the message has stage and action.
    """
    simulation = _Simulation(schedule, costs or [1.0] * schedule.parts, way)
    simulation.run()
    simulation.count()
    time = max(stage.clock for stage in simulation.stages) + max(beside, default=0.0)
    busy = sum(stage.busy for stage in simulation.stages) + sum(beside)
    peaks = tuple(stage.peak[0] for stage in simulation.stages)
    put_off = tuple(together - held for together, held in (stage.peak for stage in simulation.stages))
    begins = tuple(tuple(stage.begins) for stage in simulation.stages)
    return ScheduleCost(time, peaks, 1 - busy / (time * schedule.stages), put_off, begins)
