"""The timeline in the format of Chrome's trace events.

Slices on one track must nest, or Perfetto does not draw them: what a thread does nests by itself, messages and disk
transfers are dealt to as many tracks as overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.foundation.recorder import COUNT, FLIGHT, TRANSFER, Span

_BESIDE = {FLIGHT: "messages", TRANSFER: "disk"}


def trace(timeline: Any) -> dict[str, Any]:
    """The whole file, as JSON's values; times in microseconds from the first mark on."""
    zero = min(record.marks[0] for record in timeline.records)
    events: list[dict[str, Any]] = []
    for record in timeline.records:
        names: dict[int, str] = {}
        threads = {record.main: 0}
        for span in record.spans:
            if span.category not in (FLIGHT, TRANSFER, COUNT):
                track = threads.setdefault(span.thread, len(threads))
                names[track] = "main thread" if track == 0 else f"thread {track}"
                events.append(_slice(span, record.rank, track, zero))
            elif span.category == COUNT:
                events.append(
                    {"ph": "C", "name": span.label, "pid": record.rank, "ts": (span.begin - zero) / 1e3}
                    | {"args": {"value": span.nbytes}}
                )
        first = 1000
        for category, name in _BESIDE.items():
            for lane, span in lanes(s for s in record.spans if s.category == category):
                names[first + lane] = f"{name} {lane}"
                events.append(_slice(span, record.rank, first + lane, zero))
            first += 1000
        for number, mark in enumerate(record.marks, timeline.first - 1):
            events.append(
                {"ph": "i", "s": "p", "name": f"end of update {number}", "pid": record.rank, "tid": 0}
                | {"ts": (mark - zero) / 1e3}
            )
        events.append(_name("process_name", record.rank, 0, f"rank {record.rank}"))
        events += [_name("thread_name", record.rank, track, name) for track, name in sorted(names.items())]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Spans with the first lane in which they overlap none before."""
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        lane = next((at for at, end in enumerate(ends) if end <= span.begin), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = span.end
        yield lane, span


def _slice(span: Span, rank: int, track: int, zero: int) -> dict[str, Any]:
    arguments = {"module": span.module, "bytes": span.nbytes}
    return {
        "ph": "X",
        "name": span.label or (f"{span.category} {span.module}".rstrip()),
        "cat": span.category,
        "pid": rank,
        "tid": track,
        "ts": (span.begin - zero) / 1e3,
        "dur": (span.end - span.begin) / 1e3,
        "args": {name: value for name, value in arguments.items() if value},
    }


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": name}}
