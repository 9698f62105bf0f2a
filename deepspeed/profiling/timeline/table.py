"""The timeline as text."""

from __future__ import annotations

from typing import Any

from deepspeed.foundation.recorder import FLIGHT, TRANSFER
from deepspeed.profiling.timeline.pieces import CATEGORIES

_RANKS = 8  # columns


def table(timeline: Any) -> str:
    """See `Timeline.table`."""
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
