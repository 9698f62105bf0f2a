"""Simulation of a recorded step on a machine, with ordered streams, shared links, and a host that runs ahead or behind.

`draw` plots the timeline: a row per stream, lane and link.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepspeed.simulator.machine import Machine
from deepspeed.simulator.trace import (
    COPY,
    DISK,
    GRAPH,
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

_ORDER_COST = 0.2  # fraction of a launch: recording an event or waiting for it, without a kernel


_COLORS = {KERNEL: "#4477aa", MESSAGE: "#ee6677", COPY: "#ccbb44", DISK: "#aa3377", HOST: "#228833"}
_WORDS = {KERNEL: "kernels", MESSAGE: "messages", COPY: "host and device", DISK: "disk", HOST: "host's arithmetic"}
_GAP = 1e-4  # fraction of the step; shorter gaps are invisible and not drawn


@dataclass(slots=True)
class TimedOp:
    """Interval of an operation in the timeline.

    Args:
        track: where it runs, such as `stream 0`, `lane 1`, `host`, `to_host`, `disk`.
        name: name of the entry.
        kind: kind of the entry.
        begin, end: seconds from the start of the step.
        where: name of the last mark before it.
    """

    track: str
    name: str
    kind: str
    begin: float
    end: float
    where: str


@dataclass
class SimulatedTimeline:
    """Timeline of a step on a machine.

    Args:
        name: name of the recording.
        pieces: intervals, in the order in which the host launched them.
        seconds: time until host and device have finished.
        host: seconds in which the host launched or computed, without waits.
        ends: end time of each entry.
        clocks: time at which the host continued after each entry.
    """

    name: str
    pieces: list[TimedOp] = field(default_factory=list)
    seconds: float = 0.0
    host: float = 0.0
    ends: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)

    def busy(self, kind: str) -> list[tuple[float, float]]:
        """Return the merged (begin, end) intervals in which operations of a kind run."""
        return joined((piece.begin, piece.end) for piece in self.pieces if piece.kind == kind)

    @property
    def compute(self) -> float:
        """Return the seconds in which a kernel runs."""
        return length(self.busy(KERNEL))

    def exposed(self, kind: str = MESSAGE, beside: tuple[str, ...] = (KERNEL,)) -> float:
        """Return the seconds in which operations of `kind` run while none of the kinds in `beside` does."""
        stretches = self.busy(kind)
        return length(stretches) - self._shared(
            stretches, joined(interval for other in beside for interval in self.busy(other))
        )

    @property
    def idle(self) -> float:
        """Return the seconds without any kernel, message, copy or disk transfer, in which the host limits the step."""
        return self.seconds - length(
            joined((p.begin, p.end) for p in self.pieces if p.kind in (KERNEL, MESSAGE, COPY, DISK))
        )

    @staticmethod
    def _shared(intervals: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
        total, index = 0.0, 0
        for begin, end in intervals:
            while index < len(other) and other[index][1] <= begin:
                index += 1
            here = index
            while here < len(other) and other[here][0] < end:
                total += min(end, other[here][1]) - max(begin, other[here][0])
                here += 1
        return total


def joined(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping (begin, end) intervals; returns them sorted."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(stretches: list[tuple[float, float]]) -> float:
    """Return the total seconds of disjoint intervals."""
    return sum(end - begin for begin, end in stretches)


class _Link:
    """Link with one transfer at a time: a transfer takes the first sufficient gap after it is ready."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def take(self, ready: float, seconds: float) -> float:
        """Reserve the first gap of `seconds` from the time `ready` on; returns its start time."""
        index = bisect.bisect_left(self._taken, (ready, ready))
        if index and self._taken[index - 1][1] > ready:
            ready = self._taken[index - 1][1]
        while index < len(self._taken) and self._taken[index][0] < ready + seconds:
            ready = max(ready, self._taken[index][1])
            index += 1
        self._taken.insert(index, (ready, ready + seconds))
        return ready


class _Replay:
    def __init__(self, recording: Recording, machine: Machine, host_time: float) -> None:
        self.recording, self.machine, self.launch = recording, machine, host_time
        self.timeline = SimulatedTimeline(recording.name)
        self.clock = 0.0  # time of the host
        self.tails: dict[str, float] = {}  # by track: end of its last interval
        self.ends = self.timeline.ends
        self.links = {name: _Link() for name in ("messages", "to_host", "to_device", "disk")}
        self.floors: dict[int, float] = {}  # by stream: end of the entries that it waits for

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
        if entry.kind == GRAPH:
            self._host(self.machine.kernels.graph_launch if self.machine.kernels else self.launch)
            return self.clock
        if not entry.captured:
            self._host(self.launch)
        return {KERNEL: self._kernel, COPY: self._copy, MESSAGE: self._message}[entry.kind](entry)

    def _ready(self, stream: int) -> float:
        """Return the time at which a stream has finished its work and its dependencies."""
        return max(self.tails.get(f"stream {stream}", 0.0), self.floors.get(stream, 0.0))

    def _kernel(self, entry: HostEvent) -> float:
        begin = max(self.clock, self._ready(entry.stream))
        return self._piece(f"stream {entry.stream}", entry, begin, begin + self.machine.seconds(entry))

    def _copy(self, entry: HostEvent) -> float:
        seconds = self.machine.latency / 2 + (entry.nbytes / self.machine.link if self.machine.link else 0.0)
        begin = self.links[entry.name].take(max(self.clock, self._ready(entry.stream)), seconds)
        self.tails[f"stream {entry.stream}"] = begin + seconds
        return self._piece(entry.name, entry, begin, begin + seconds)

    def _message(self, entry: HostEvent) -> float:
        machine, lane = self.machine, f"lane {entry.lane}"
        on_link, besides = machine.message(entry.name, entry.nbytes, entry.group)
        ready = max(self.clock, self._ready(entry.stream), self.tails.get(lane, 0.0))
        if machine.shared:  # done by the ranks' own cores
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
    """Simulate a recording on a machine.

    Args:
        recording: one rank's step; all ranks are assumed to do the same at the same time.
        machine: the machine.
        host_time: host seconds per launch; None or 0: that of the recording, or else of the machine.
    """
    return _Replay(recording, machine, host_time or recording.host_time or machine.launch).run()


def repeated(recording: Recording, times: int) -> Recording:
    """Return a recording with more micro-batches: everything before the mark `step` is repeated; memory is left out.

    Args:
        recording: recording of one micro-batch, with marks `forward`, `backward`, `step`; without `step`, or if `times`
            is at most 1, the same object is returned.
        times: number of micro-batches.
    """
    first = next((index for index, e in enumerate(recording.entries) if e.kind == MARK and e.name == "step"), None)
    if first is None or times <= 1:
        return recording
    head, tail, entries = recording.entries[:first], recording.entries[first:], list[HostEvent]()
    for turn in range(times):
        entries += [_shifted(entry, turn * first) for entry in head]
    entries += [_shifted(entry, (times - 1) * first) for entry in tail]
    facts = {**recording.facts, "tokens": recording.facts.get("tokens", 0) * times}
    return Recording(recording.name, recording.rank, recording.size, entries, [], recording.host_time, facts)


def captured(recording: Recording) -> Recording:
    """Return a recording whose kernels are launched as graphs: one for each row of kernels between other entries."""
    entries: list[HostEvent] = []
    places: list[int] = []  # by entry: its index in the new recording
    before = ""
    for entry in recording.entries:
        if entry.kind == KERNEL and before != KERNEL:
            entries.append(HostEvent(GRAPH, "graph", entry.stream, where=entry.where))
        after = places[entry.after] if entry.after != NOTHING else NOTHING
        places.append(len(entries))
        entries.append(replace(entry, after=after, captured=entry.kind == KERNEL))
        before = entry.kind
    return replace(recording, entries=entries, blocks=[])


def _shifted(entry: HostEvent, by: int) -> HostEvent:
    if entry.after == NOTHING or not by:
        return entry
    return replace(entry, after=entry.after + by)


def draw(timelines: Sequence[SimulatedTimeline], path: str | Path, title: str) -> None:
    """Plot timelines to a file; ImportError without matplotlib (extra `plot`).

    Args:
        timelines: drawn one above the other, on a common time axis.
        path: path of a file in a format of matplotlib.
        title: title of the figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    most = max(timeline.seconds for timeline in timelines)
    rows = [sorted({piece.track for piece in timeline.pieces}) for timeline in timelines]
    figure = Figure(figsize=(12, 1.2 + 0.45 * sum(len(tracks) + 1 for tracks in rows)), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, timeline, tracks in zip(places, timelines, rows, strict=True):
        for row, track in enumerate(tracks):
            for kind, stretches in _stretches(timeline.pieces, track, most * _GAP).items():
                bars = [(begin * 1e3, (end - begin) * 1e3) for begin, end in stretches]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=_COLORS[kind])
        axes.set_yticks(range(len(tracks)), tracks)
        axes.set_title(
            f"{timeline.name}: {timeline.seconds * 1e3:.1f} ms; messages exposed {timeline.exposed() * 1e3:.1f} ms; "
            f"nothing but the host {timeline.idle * 1e3:.1f} ms",
            fontsize=9,
            loc="left",
        )
    places[-1].set_xlabel("ms")
    kinds = {piece.kind for timeline in timelines for piece in timeline.pieces}
    shown = [Patch(color=_COLORS[kind], label=_WORDS[kind]) for kind in _COLORS if kind in kinds]
    figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _stretches(pieces: Sequence[TimedOp], track: str, gap: float) -> dict[str, list[tuple[float, float]]]:
    """Return the intervals of a track by kind, merged over gaps of up to `gap` seconds."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for kind in _COLORS:
        intervals = [(p.begin, p.end + gap) for p in pieces if p.track == track and p.kind == kind]
        if intervals:
            by_kind[kind] = [(begin, end - gap) for begin, end in joined(intervals)]
    return by_kind
