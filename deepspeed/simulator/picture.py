"""The timeline of a step as a picture: a row per stream, lane and link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepspeed.simulator.replay import SimulatedTimeline, TimedOp, joined
from deepspeed.simulator.trace import COPY, DISK, HOST, KERNEL, MESSAGE

_COLORS = {KERNEL: "#4477aa", MESSAGE: "#ee6677", COPY: "#ccbb44", DISK: "#aa3377", HOST: "#228833"}
_WORDS = {KERNEL: "kernels", MESSAGE: "messages", COPY: "host and device", DISK: "disk", HOST: "host's arithmetic"}
_GAP = 1e-4  # shorter gaps than this part of the step are drawn over: nobody could see them


def draw(timelines: Sequence[SimulatedTimeline], path: str | Path, title: str) -> None:
    """Write the picture; needs matplotlib (extra `plot`).

    Args:
        timelines: one above the other, on one axis of time.
        path: of a file that matplotlib can write.
        title: above all.
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
        for at, track in enumerate(tracks):
            for kind, stretches in _stretches(timeline.pieces, track, most * _GAP).items():
                bars = [(begin * 1e3, (end - begin) * 1e3) for begin, end in stretches]
                axes.broken_barh(bars, (at - 0.4, 0.8), color=_COLORS[kind])
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
    """What a track did, by kind, without gaps that nobody could see."""
    found: dict[str, list[tuple[float, float]]] = {}
    for kind in _COLORS:
        mine = [(p.begin, p.end + gap) for p in pieces if p.track == track and p.kind == kind]
        if mine:
            found[kind] = [(begin, end - gap) for begin, end in joined(mine)]
    return found
