"""Output of a timeline: a table with advice, a picture, and Chrome trace events.

Perfetto draws slices on one track only if they nest. Spans of one thread do; messages and disk transfers that overlap
get separate tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed.errors import NotAvailableError
from deepspeed.foundation.spans import (
    BACKWARD,
    COPY,
    COUNT,
    DISK,
    FLIGHT,
    FORWARD,
    LOADER,
    RECOMPUTE,
    SAVE,
    STEP,
    TRANSFER,
    UPDATE,
    Span,
)
from deepspeed.profiling.timeline.segments import CATEGORIES, COMMUNICATION, OUTSIDE, WAITING

_RANKS = 8  # columns


def table(timeline: Any) -> str:
    """Format a timeline as text; `Timeline.table` describes the content."""
    step, limit = timeline.step_seconds, timeline.limit
    last = timeline.first + timeline.updates - 1
    lines = [f"updates {timeline.first} to {last}: {1e3 * step:.2f} ms each, mean of {len(timeline.records)} rank(s)"]
    shown = timeline.records[:_RANKS]
    by_rank = [timeline.shares(record.rank) for record in shown]
    lines.append(f"{'ms of an update':<16}{'mean':>10}{'share':>8}" + "".join(f"{f'rank {r.rank}':>10}" for r in shown))
    shares = timeline.shares()
    for category in CATEGORIES:
        if shares[category]:
            row = f"{category:<16}{1e3 * shares[category]:>10.2f}{100 * shares[category] / step:>7.1f}%"
            lines.append(row + "".join(f"{1e3 * of_rank[category]:>10.2f}" for of_rank in by_rank))
    lines.append(f"{'sum':<16}{1e3 * sum(shares.values()):>10.2f}{100 * sum(shares.values()) / step:>7.1f}%")
    flying, hidden = timeline.beside(FLIGHT)
    lines.append(
        f"messages are under way for {1e3 * flying:.2f} ms, {1e3 * hidden:.2f} ms of it beside other work; "
        f"exposed communication, with waiting: {1e3 * timeline.exposed:.2f} ms"
    )
    moved, behind = timeline.beside(TRANSFER)
    if moved:
        lines.append(f"the disk is busy for {1e3 * moved:.2f} ms, {1e3 * behind:.2f} ms of it beside other work")
    for name, nbytes in sorted(timeline.received().items()):
        lines.append(f"{name}: {nbytes / timeline.updates / len(timeline.records):,.0f} bytes received by a rank")
    for charge in timeline.charges[:3]:
        lost = charge.nanoseconds / 1e6 / timeline.updates / max(1, len(timeline.records) - 1)
        where = f" in {charge.module}" if charge.module else ""
        lines.append(f"the others wait {lost:.2f} ms for rank {charge.rank}: it has more {charge.category}{where}")
    where = (f" in {limit.module}" if limit.module else "") + ("" if limit.rank is None else f" on rank {limit.rank}")
    lines.append(f"limited by {limit.category}{where} ({100 * limit.share:.0f} %): {limit.advice}")
    lost = sum(record.lost for record in timeline.records)
    if lost:
        lines.append(f"{lost} spans did not fit, and the first updates are incomplete: raise timeline.ring")
    return "\n".join(lines)


ADVICE = {
    FORWARD: "the model computes; a larger train_micro_batch_size_per_gpu or a lower precision (bf16) uses it better",
    BACKWARD: "the model computes; a larger train_micro_batch_size_per_gpu or a lower precision (bf16) uses it better",
    RECOMPUTE: "activation_checkpointing computes forward twice; recompute fewer blocks, if memory allows",
    UPDATE: "the optimizer: fused or native kernels, offload_optimizer.device none, "
    "or more gradient_accumulation_steps",
    STEP: "agreement, norm and rounding around the update: more gradient_accumulation_steps makes them rarer",
    COMMUNICATION: "messages: zero_optimization.overlap_comm true, a larger reduce_bucket_size or (stage 3) "
    "stage3_prefetch_bucket_size and stage3_max_live_parameters, or more gradient_accumulation_steps",
    WAITING: "ranks wait for each other in turns: see that their batches are of one size",
    DISK: "nvme: offload to cpu if it fits, or offload_optimizer.pipeline_read and pipeline_write true, a larger "
    "buffer_count, and aio as ds_nvme_tune measures it",
    COPY: "copies between host and device: offload less, or pin_memory true",
    LOADER: "the loader: more num_local_io_workers of deepspeed_io, or prepare the data ahead",
    SAVE: "saving: checkpoint.async_save true, or save less often",
    OUTSIDE: "time outside of the engine, between its calls: the script itself, or a loader that is not the engine's",
}


_BESIDE = {FLIGHT: "messages", TRANSFER: "disk"}


def trace(timeline: Any) -> dict[str, Any]:
    """Return the Chrome trace as JSON values; times are microseconds since the start of the first update."""
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
        named = [("process_name", 0, f"rank {record.rank}")]
        named += [("thread_name", track, name) for track, name in sorted(names.items())]
        events += [
            {"ph": "M", "name": kind, "pid": record.rank, "tid": track, "args": {"name": name}}
            for kind, track, name in named
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Yield (lane, span) in order of begin, with the lowest lane number in which the span overlaps no earlier one."""
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        lane = next((index for index, end in enumerate(ends) if end <= span.begin), len(ends))
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


_LANES = 6  # of messages and transfers, under each rank
_COLOURS = dict(zip(CATEGORIES, (f"C{number}" for number in (0, 2, 8, 1, 5, 3, 7, 4, 6, 9)), strict=False))
_COLOURS |= {"save": "black", "outside": "lightgrey"}


def draw(timeline: Any, path: str | Path) -> None:
    """Write a picture of the last update.

    Args:
        timeline: timeline of all ranks.
        path: target file; the suffix determines the format.

    Raises:
        NotAvailableError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise NotAvailableError("the timeline's picture needs matplotlib: pip install 'deepspeed[plot]'")
    figure = import_module("matplotlib.figure").Figure(figsize=(14, 1.5 + 1.2 * len(timeline.records)))
    axes = figure.add_subplot()
    zero = min(record.marks[-2] for record in timeline.records)
    rows = []
    for row, (record, pieces) in enumerate(zip(timeline.records, timeline.pieces, strict=True)):
        low, high = record.marks[-2], record.marks[-1]
        rows.append(f"rank {record.rank}")
        for category in CATEGORIES:
            bars = [(p.begin, p.end) for p in pieces if p.category == category and p.end > low]
            spans = [((max(b, low) - zero) / 1e6, (e - max(b, low)) / 1e6) for b, e in bars]
            axes.broken_barh(spans, (row, 0.5), facecolors=_COLOURS[category], label=category if not row else None)
        beside = [s for s in record.spans if s.category in (FLIGHT, TRANSFER) and s.end > low and s.begin < high]
        for lane, span in lanes(beside):
            if lane < _LANES:
                begin = (max(span.begin, low) - zero) / 1e6
                place = (row + 0.55 + 0.06 * lane, 0.05)
                axes.broken_barh([(begin, (span.end - zero) / 1e6 - begin)], place, facecolors="grey")
    axes.set_yticks([row + 0.25 for row in range(len(rows))], rows)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    limit = timeline.limit
    axes.set_title(
        f"update {timeline.first + timeline.updates - 1}, limited by {limit.category} {limit.module}".strip()
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=6, fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=110)
