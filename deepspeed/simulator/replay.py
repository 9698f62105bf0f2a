"""When a recorded step's pieces run on a machine: streams in order, links shared, the host ahead or behind."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepspeed.simulator.machine import Machine
from deepspeed.simulator.trace import (
    COPY,
    DISK,
    HOST,
    KERNEL,
    MARK,
    MESSAGE,
    NOTHING,
    ORDER,
    WAIT,
    HostEvent,
    Recording,
)

_ORDER_COST = 0.2  # of a launch: an event is recorded or waited for without a kernel


@dataclass(slots=True)
class TimedOp:
    """Something that ran.

    Args:
        track: `stream 0`, `lane 1`, `host`, `to_host`, `disk`.
        name: of the entry.
        kind: of the entry.
        begin, end: seconds from the start of the step.
        where: the mark before it.
    """

    track: str
    name: str
    kind: str
    begin: float
    end: float
    where: str


@dataclass
class SimulatedTimeline:
    """A step on a machine.

    Args:
        name: of the recording.
        pieces: in the order of the host.
        seconds: until host and device are done.
        host: seconds in which the host launched or computed; waits are not in it.
        ends: by entry, when it is over.
        clocks: by entry, when the host went on.
    """

    name: str
    pieces: list[TimedOp] = field(default_factory=list)
    seconds: float = 0.0
    host: float = 0.0
    ends: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)

    def busy(self, kind: str) -> list[tuple[float, float]]:
        """Stretches in which something of a kind ran, joined."""
        return joined((piece.begin, piece.end) for piece in self.pieces if piece.kind == kind)

    @property
    def compute(self) -> float:
        """Seconds in which a kernel ran."""
        return length(self.busy(KERNEL))

    def exposed(self, kind: str = MESSAGE, beside: tuple[str, ...] = (KERNEL,)) -> float:
        """Seconds in which something of a kind ran, and nothing of those that it can hide behind."""
        stretches = self.busy(kind)
        return length(stretches) - self._shared(stretches, joined(one for other in beside for one in self.busy(other)))

    @property
    def idle(self) -> float:
        """Seconds in which nothing ran but the host: it limits there."""
        return self.seconds - length(
            joined((p.begin, p.end) for p in self.pieces if p.kind in (KERNEL, MESSAGE, COPY, DISK))
        )

    @staticmethod
    def _shared(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
        total, at = 0.0, 0
        for begin, end in one:
            while at < len(other) and other[at][1] <= begin:
                at += 1
            here = at
            while here < len(other) and other[here][0] < end:
                total += min(end, other[here][1]) - max(begin, other[here][0])
                here += 1
        return total


def joined(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def length(stretches: list[tuple[float, float]]) -> float:
    """Seconds together."""
    return sum(end - begin for begin, end in stretches)


class _Link:
    """Something that one transfer uses at a time: whoever is ready takes the first gap that is long enough."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def take(self, ready: float, seconds: float) -> float:
        """When a transfer begins that is ready then and takes so long."""
        at = bisect.bisect_left(self._taken, (ready, ready))
        if at and self._taken[at - 1][1] > ready:
            ready = self._taken[at - 1][1]
        while at < len(self._taken) and self._taken[at][0] < ready + seconds:
            ready = max(ready, self._taken[at][1])
            at += 1
        self._taken.insert(at, (ready, ready + seconds))
        return ready


class _Replay:
    def __init__(self, recording: Recording, machine: Machine, host_time: float) -> None:
        self.recording, self.machine, self.launch = recording, machine, host_time
        self.timeline = SimulatedTimeline(recording.name)
        self.clock = 0.0  # of the host
        self.tails: dict[str, float] = {}  # by track: when its last piece is over
        self.ends = self.timeline.ends
        self.links = {name: _Link() for name in ("messages", "to_host", "to_device", "disk")}
        self.floors: dict[int, float] = {}  # by stream: when what it was ordered behind is over

    def run(self) -> SimulatedTimeline:
        for entry in self.recording.entries:
            self.ends.append(self._one(entry))
            self.timeline.clocks.append(self.clock)
        self.timeline.seconds = max([self.clock, *self.ends])
        return self.timeline

    def _host(self, seconds: float) -> None:
        self.clock += seconds
        self.timeline.host += seconds

    def _one(self, entry: HostEvent) -> float:
        if entry.kind == MARK:
            return self.clock
        if entry.kind == ORDER:
            self._host(self.launch * _ORDER_COST)
            end = self.ends[entry.after] if entry.after != NOTHING else 0.0
            self.floors[entry.stream] = max(self.floors.get(entry.stream, 0.0), end)
            return self._ready(entry.stream)
        if entry.kind == WAIT:
            self.clock = max(self.clock, self.ends[entry.after] if entry.after != NOTHING else 0.0)
            return self.clock
        if entry.kind == HOST:
            begin = self.clock
            self._host(entry.nbytes / (self.machine.host or self.machine.bandwidth))
            return self._piece("host", entry, begin, self.clock)
        if entry.kind == DISK:
            seconds = entry.nbytes / self.machine.disk if self.machine.disk else 0.0
            begin = self.links["disk"].take(self.clock, seconds)
            return self._piece("disk", entry, begin, begin + seconds)
        self._host(self.launch)
        return {KERNEL: self._kernel, COPY: self._copy, MESSAGE: self._message}[entry.kind](entry)

    def _ready(self, stream: int) -> float:
        """When a stream has done what it was given, and what it waits for is over."""
        return max(self.tails.get(f"stream {stream}", 0.0), self.floors.get(stream, 0.0))

    def _kernel(self, entry: HostEvent) -> float:
        begin = max(self.clock, self._ready(entry.stream))
        return self._piece(f"stream {entry.stream}", entry, begin,
                           begin + self.machine.kernel(entry.name, entry.flops, entry.nbytes, entry.dtype))  # fmt: skip

    def _copy(self, entry: HostEvent) -> float:
        seconds = self.machine.latency / 2 + (entry.nbytes / self.machine.link if self.machine.link else 0.0)
        begin = self.links[entry.name].take(max(self.clock, self._ready(entry.stream)), seconds)
        self.tails[f"stream {entry.stream}"] = begin + seconds
        return self._piece(entry.name, entry, begin, begin + seconds)

    def _message(self, entry: HostEvent) -> float:
        machine, lane = self.machine, f"lane {entry.lane}"
        on_link, besides = machine.message(entry.name, entry.nbytes, entry.group)
        ready = max(self.clock, self._ready(entry.stream), self.tails.get(lane, 0.0))
        if machine.shared:  # the ranks' own cores do it
            begin = ready
            self.tails[f"stream {entry.stream}"] = begin + on_link + besides
        else:
            begin = self.links["messages"].take(ready + besides, on_link) - besides
        return self._piece(lane, entry, begin, begin + besides + on_link)

    def _piece(self, track: str, entry: HostEvent, begin: float, end: float) -> float:
        self.tails[track] = max(self.tails.get(track, 0.0), end)
        self.timeline.pieces.append(TimedOp(track, entry.name, entry.kind, begin, end, entry.where))
        return end


def replay(recording: Recording, machine: Machine, host_time: float | None = None) -> SimulatedTimeline:
    """Run a recording on a machine.

    Args:
        recording: one rank's step; all ranks are taken to do the same at the same time.
        machine: where.
        host_time: seconds of the host per launch; None: the recording's, else the machine's.
    """
    return _Replay(recording, machine, host_time or recording.host_time or machine.launch).run()


def repeated(recording: Recording, times: int) -> Recording:
    """A step of more micro-batches: what comes before the mark `step` as often as asked, and then the step.

    Args:
        recording: of one micro-batch, marked `forward`, `backward`, `step`.
        times: micro-batches.
    """
    first = next((at for at, e in enumerate(recording.entries) if e.kind == MARK and e.name == "step"), None)
    if first is None or times <= 1:
        return recording
    head, tail, entries = recording.entries[:first], recording.entries[first:], list[HostEvent]()
    for turn in range(times):
        entries += [_shifted(entry, turn * first) for entry in head]
    entries += [_shifted(entry, (times - 1) * first) for entry in tail]
    facts = {**recording.facts, "tokens": recording.facts.get("tokens", 0) * times}
    return Recording(recording.name, recording.rank, recording.size, entries, [], recording.host_time, facts)


def _shifted(entry: HostEvent, by: int) -> HostEvent:
    if entry.after == NOTHING or not by:
        return entry
    return HostEvent(
        entry.kind,
        entry.name,
        entry.stream,
        entry.flops,
        entry.nbytes,
        entry.dtype,
        entry.group,
        entry.lane,
        entry.after + by,
        entry.where,
    )
