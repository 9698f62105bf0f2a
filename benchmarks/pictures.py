"""The pictures of the README and the site, from kept results alone: `make pictures`, with which `make bench` ends.

`docs/images/step-{light,dark}.svg` is a step's time beside DDP, FSDP2 and upstream; `memory-{light,dark}.svg` the bytes
of state per parameter by stage; `…-phone-….svg` the same with panels under one another, for narrow screens. Each bar is
an element with an id, so that a test can measure what is drawn.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
STAGES = ("stage0", "stage1", "stage2", "stage3")
DTYPES = ("fp32", "bf16")
OURS = "deepspeed 1."


@dataclass(frozen=True)
class Look:
    """Colours of one scheme."""

    ink: str
    faint: str
    ours: str
    ours_light: str
    others: str
    others_light: str
    on: dict[str, str]  # ink on each of the four


def _look(ink: str, faint: str, grounds: tuple[str, ...], inks: tuple[str, ...]) -> Look:
    return Look(ink, faint, *grounds, on=dict(zip(grounds, inks, strict=True)))


LOOKS = {
    "light": _look("#1c2733", "#c9d1d9", ("#1f6fbf", "#a9cdee", "#a3a9b0", "#d3d7db"), ("#ffffff", *["#1c2733"] * 3)),
    "dark": _look(
        "#dde3ea", "#47505b", ("#58a6ff", "#2b5f99", "#8b939c", "#4d545c"), ("#0d1117", "#fff", "#0d1117", "#fff")
    ),
}


@dataclass(frozen=True)
class Page:
    """Where things stand on a picture, in its own fractions, for a width of screen."""

    suffix: str
    inches: tuple[float, float]
    grid: tuple[int, int]
    title: float  # its size, in points
    below: float  # heights: of the line below the title, and of the legend's top
    legend: tuple[float, float]
    margins: dict[str, float]


PAGES = (
    Page("", (9.6, 4.0), (1, 2), 12.5, 0.885, (0.995, 0.885),
         {"left": 0.05, "right": 0.992, "top": 0.74, "bottom": 0.135, "wspace": 0.06}),
    Page("-phone", (4.4, 6.4), (2, 1), 10.8, 0.89, (0.995, 0.878),
         {"left": 0.09, "right": 0.985, "top": 0.79, "bottom": 0.145, "hspace": 0.32}),
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One bar: its panel (a dtype), its group (a stage), whose it is, its height with the interval around it."""

    panel: str
    group: str
    side: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ident(self) -> str:
        """The id of its element."""
        return f"bar:{self.panel}:{self.group}:{self.side}"


# ---- what is drawn


def _newest(name: str, whole: Any) -> tuple[Path, list[dict[str, Any]]]:
    """The kept result of the newest date that has everything the picture shows."""
    found = sorted(RESULTS.glob(f"*/{name}"), key=lambda path: path.parent.name[-len("2026-11-21") :])
    for path in reversed(found):
        rows = json.loads(path.read_text())
        if whole(rows):
            return path, rows
    raise SystemExit(
        f"no kept {name} under {RESULTS} has every side of the picture: run the benchmark with all of them"
    )


def step_rows() -> tuple[Path, list[dict[str, Any]]]:
    """Times of a step, of a run that had upstream's environment beside (`make bench BENCH_ARGS="--env PYTHON"`)."""

    def whole(rows: list[dict[str, Any]]) -> bool:
        seen = {(row["dtype"], OURS in row["environment"], row["side"]) for row in rows}
        sides = [(True, "fsdp2"), *((ours, stage) for ours in (True, False) for stage in STAGES)]
        return all((dtype, *side) in seen for dtype in DTYPES for side in sides)

    return _newest("train_step.json", whole)


def step_bars() -> list[Bar]:
    """Time of a step over DDP's in the same processes: ours and upstream by stage, FSDP2 beside stage 3."""
    bars = []
    for row in step_rows()[1]:
        ours = OURS in row["environment"]
        if row["side"] in STAGES or (ours and row["side"] == "fsdp2"):
            group = "stage3" if row["side"] == "fsdp2" else row["side"]
            side = "FSDP2" if row["side"] == "fsdp2" else "ours" if ours else "upstream"
            bars.append(Bar(row["dtype"], group, side, row["ratio"], row["low"], row["high"]))
    return bars


def memory_rows() -> tuple[Path, list[dict[str, Any]]]:
    """Counted bytes of state per parameter."""
    wanted = {(ranks, dtype, stage) for ranks in (1, 2, 4) for dtype in DTYPES for stage in range(4)}
    return _newest("memory.json", lambda rows: wanted <= {(row["ranks"], row["dtype"], row["stage"]) for row in rows})


def memory_bars() -> list[Bar]:
    """Bytes of state per parameter on each of 2 and 4 ranks, counted on live tensors."""
    return [
        Bar(row["dtype"], f"stage{row['stage']}", f"{row['ranks']} ranks", row["bytes"])
        for row in memory_rows()[1]
        if row["ranks"] in (2, 4)
    ]


def step_lines() -> dict[str, float]:
    """DDP's time, which is the unit."""
    return dict.fromkeys(DTYPES, 1.0)


def memory_lines() -> dict[str, float]:
    """Bytes of one rank alone, by dtype."""
    return {row["dtype"]: row["bytes"] for row in memory_rows()[1] if (row["ranks"], row["stage"]) == (1, 0)}


def step_title() -> str:
    """The answer in words, from the bars."""
    value = {(bar.panel, bar.group, bar.side): bar.value for bar in step_bars()}
    gains = [value[d, s, "upstream"] / value[d, s, "ours"] for d in DTYPES for s in STAGES]
    sharded = [value[d, "stage3", "FSDP2"] / value[d, "stage3", "ours"] for d in DTYPES]
    return (
        f"Every stage: {min(gains):.2f}–{max(gains):.2f} × faster than upstream; "
        f"stage 3: {min(sharded):.2f}–{max(sharded):.2f} × faster than FSDP2"
    )


# ---- how


def _panels(
    bars: list[Bar], colours: dict[str, str], look: Look, words: dict[str, str], lines: dict[str, float], page: Page
) -> Any:
    """A panel for each dtype, a group of bars for each stage, and across it the line that they are compared to."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(*page.grid, figsize=page.inches, sharey=True)
    title = words["title"] if page.grid[0] == 1 else words["title"].replace("; ", ";\n")
    figure.suptitle(title, x=0.012, ha="left", color=look.ink, fontsize=page.title, fontweight="bold")
    figure.text(0.012, page.below, words["below"], ha="left", color=look.ink, fontsize=9.5)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        _draw_panel(
            axes, [bar for bar in bars if bar.panel == dtype], colours, look, 0.25 if max(lines.values()) < 2 else 4
        )
        axes.set_title(dtype, loc="left", color=look.ink, fontsize=11, pad=8)
        axes.axhline(lines[dtype], color=look.ink, linewidth=1.1, linestyle=(0, (4, 2)), gid=f"line:{dtype}", zorder=3)
    foot = textwrap.fill(words["foot"], int(page.inches[0] * 16))
    figure.text(0.012, 0.012, foot, ha="left", va="bottom", color=look.ink, fontsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    handles.append(plt.Line2D([], [], color=look.ink, linestyle=(0, (4, 2))))
    names = [*colours, words["line"]]
    figure.legend(handles, names, loc="upper right", bbox_to_anchor=page.legend, ncols=len(names), frameon=False,
                  labelcolor=look.ink, fontsize=9.5, handlelength=1.4, columnspacing=1.4)  # fmt: skip
    figure.subplots_adjust(**page.margins)
    return figure


def _draw_panel(axes: Any, bars: list[Bar], colours: dict[str, str], look: Look, step: float) -> None:
    from matplotlib.ticker import MultipleLocator

    width = 0.31
    for at, stage in enumerate(STAGES):
        sides = [side for side in colours if any((bar.group, bar.side) == (stage, side) for bar in bars)]
        for place, side in enumerate(sides):
            bar = next(bar for bar in bars if (bar.group, bar.side) == (stage, side))
            x = at + (place - (len(sides) - 1) / 2) * width
            drawn = axes.bar(x, bar.value, width * 0.94, color=colours[side], zorder=2)
            drawn[0].set_gid(bar.ident)
            if bar.low is not None:
                axes.vlines(x, bar.low, bar.high, color=look.ink, linewidth=0.9, zorder=4)
            text = f"{bar.value:.2f}" if bar.low is not None else f"{bar.value:.1f}".removesuffix(".0")
            ground = colours[side]
            axes.annotate(text, (x, 0), (0, 4), textcoords="offset points", ha="center", fontsize=8, zorder=5,
                          color=look.on[ground], fontweight="bold" if ground == look.ours else "normal")  # fmt: skip
    axes.set_xticks(range(len(STAGES)), [f"stage {stage[-1]}" for stage in STAGES], color=look.ink, fontsize=10)
    axes.set_xlim(-0.55, len(STAGES) - 0.45)
    axes.tick_params(axis="y", colors=look.ink, labelsize=8.5, length=0)
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.grid(axis="y", color=look.faint, linewidth=0.6, zorder=0)
    for edge in ("top", "right", "left"):
        axes.spines[edge].set_visible(False)
    axes.spines["bottom"].set_color(look.ink)


def machine(path: Path) -> str:
    """Where and when a result was taken, from its folder's name."""
    name, date = path.parent.name[: -len("-2026-11-21")], path.parent.name[-len("2026-11-21") :]
    maker = "AMD EPYC" if name.startswith("amd") else "Intel Xeon" if name.startswith("intel") else name
    return f"{maker}, two cores, {date}"


def draw(name: str, look: str, page: Page) -> Any:
    """A picture as a figure: `step` or `memory`, in the colours of a look, for a page."""
    colours = LOOKS[look]
    if name == "step":
        words = {
            "title": step_title(),
            "below": "Time of a training step over DDP's; lower is faster",
            "foot": f"20 M-parameter GPT, two CPU ranks; medians of paired ratios with 95 % intervals. "
            f"{machine(step_rows()[0])}: benchmarks/train_step.py",
            "line": "DDP",
        }
        sides = {"ours": colours.ours, "upstream": colours.others, "FSDP2": colours.others_light}
        return _panels(step_bars(), sides, colours, words, step_lines(), page)
    words = {
        "title": "Each stage leaves less on every rank",
        "below": "Bytes of training state per parameter, Adam",
        "foot": f"Counted on live tensors of a GPT, before the step. {machine(memory_rows()[0])}: benchmarks/memory.py",
        "line": "one rank",
    }
    sides = {"2 ranks": colours.ours_light, "4 ranks": colours.ours}
    return _panels(memory_bars(), sides, colours, words, memory_lines(), page)


def draw_all(folder: Path) -> list[Path]:
    """Every picture for each scheme and page; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    paths = []
    settings = {"svg.fonttype": "path", "svg.hashsalt": "pictures", "font.family": "DejaVu Sans"}
    for name, look, page in itertools.product(("step", "memory"), LOOKS, PAGES):
        with plt.rc_context(settings):
            figure = draw(name, look, page)
            path = folder / f"{name}{page.suffix}-{look}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            plt.close(figure)
        # Attributes end lines with a space there, which editors and diffs complain about.
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        paths.append(path)
    return paths


# ---- what a picture shows, read back from its shapes


def measured(picture: Path) -> dict[str, float]:
    """Heights of a picture's bars over the height of their panel's line, by id, told by the shapes alone."""
    text = picture.read_text()
    bars = dict(shapes(text, "bar:"))
    ground: dict[str, float] = {}
    for ident, points in bars.items():
        panel = ident.split(":")[1]
        ground[panel] = max(ground.get(panel, 0.0), *points)
    lines = {ident.partition(":")[2]: points[0] for ident, points in shapes(text, "line:")}
    return {
        ident: (ground[panel] - min(points)) / (ground[panel] - lines[panel])
        for ident, points in bars.items()
        for panel in [ident.split(":")[1]]
    }


def shapes(text: str, prefix: str) -> Iterator[tuple[str, list[float]]]:
    for found in re.finditer(rf'<g id="({prefix}[^"]+)">\s*<path d="([^"]+)"', text):
        yield found[1], [float(y) for _, y in re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", found[2])]


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    for written in draw_all(IMAGES):
        print(f"written: {written.relative_to(IMAGES.parents[1])}")
