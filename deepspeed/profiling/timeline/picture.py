"""The timeline as a picture: one row of pieces for each rank, with its messages below."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed.errors import NotAvailableError
from deepspeed.foundation.recorder import FLIGHT, TRANSFER
from deepspeed.profiling.timeline.chrome import lanes
from deepspeed.profiling.timeline.pieces import CATEGORIES

_LANES = 6  # of messages and transfers, under each rank
_COLOURS = dict(zip(CATEGORIES, (f"C{at}" for at in (0, 2, 8, 1, 5, 3, 7, 4, 6, 9)), strict=False))
_COLOURS |= {"save": "black", "outside": "lightgrey"}


def draw(timeline: Any, path: str | Path) -> None:
    """Write a picture of the last update.

    Args:
        timeline: of all ranks.
        path: its ending says the format.

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
