"""Draws the pictures of ARCHITECTURE.md from the code: `python -m website.architecture`.

`docs/images/floors-{light,dark}.svg`: the rooms of the package on their floors, sized by lines, and the imports between
them. `docs/images/step-files-{light,dark}.svg`: the files that one training step at stage 2 enters, by the call that
enters them first, and the imports between those files.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PARTS = ("forward", "backward", "step")


@dataclass(frozen=True)
class Look:
    """Colours of a scheme: text, boxes, arrows, and the three parts of a step."""

    ink: str
    box: str
    edge: str
    parts: tuple[str, str, str]


LOOKS = {
    "light": Look("#1f2328", "#dbe9f9", "#8b949e", ("#cfe8d5", "#f6dcc0", "#dbe9f9")),
    "dark": Look("#e6edf3", "#1f3a5f", "#6e7681", ("#1d4428", "#5a3a16", "#1f3a5f")),
}


def floors() -> list[list[str]]:
    """Rooms from the top floor to the lowest, of the import contract in `pyproject.toml`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == ["deepspeed"])
    return [[name.strip(" ()") for name in re.split(r"[|:]", layer)] for layer in layers]


def imports() -> dict[str, set[str]]:
    """For each file of the package, by its path, the files that it imports."""
    package = ROOT / "deepspeed"
    paths = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for path in paths:
        edges[path] = set()
        for node in ast.walk(ast.parse((package / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed."):
                base = "/".join((node.module or "").split(".")[1:])
                for name in ("", *(f"/{alias.name}" for alias in node.names)):
                    edges[path] |= {f"{base}{name}.py", f"{base}{name}/__init__.py"} & paths
    return edges


def room(path: str) -> str:
    """The room of a file."""
    return path.partition("/")[0].removesuffix(".py")


def draw_floors(axes: Any, look: Look) -> None:
    """Rooms as boxes, a row for each floor; an arrow for each pair of rooms, as wide as it has imports."""
    lines = Counter[str]()
    for path in (ROOT / "deepspeed").rglob("*.py"):
        lines[room(path.relative_to(ROOT / "deepspeed").as_posix())] += path.read_text().count("\n")
    rows, centres = floors(), {}
    for level, names in enumerate(rows):
        widths = [max(0.1 * len(name) + 0.3, 3.6 * (lines[name] / max(lines.values())) ** 0.5) for name in names]
        left = -(sum(widths) + 0.35 * (len(names) - 1)) / 2
        for name, width in zip(names, widths, strict=True):
            centres[name] = (left + width / 2, -level)
            _box(axes, left, -level - 0.3, width, 0.6, look.box, look, f"{name}\n{lines[name]:,}", 7.5)
            left += width + 0.35
    counts = Counter[tuple[str, str]]()
    for path, targets in imports().items():
        counts.update((room(path), room(target)) for target in targets if room(path) != room(target))
    for (start, end), count in counts.items():
        if start in centres and end in centres:
            (x, y), (to_x, to_y) = centres[start], centres[end]
            style = {"arrowstyle": "-|>", "color": look.edge, "lw": 0.25 + 0.012 * count, "alpha": 0.45}
            axes.annotate("", (to_x, to_y + 0.3), (x, y - 0.3), arrowprops=style, zorder=1)
    axes.set_xlim(-6.2, 6.2)
    axes.set_ylim(-len(rows) + 0.4, 0.6)


def draw_step(axes: Any, look: Look) -> None:
    """Files as boxes in columns by the call that enters them first, from top to bottom by floor; arrows are imports."""
    sys.path.insert(0, str(ROOT))
    from tests.architecture.test_step_files import entered

    order = {name: level for level, names in enumerate(floors()) for name in names}
    files = entered({"stage": 2})
    seen: set[str] = set()
    centres: dict[str, tuple[float, float]] = {}
    tallest = max(len(files[part]) for part in PARTS)
    for column, part in enumerate(PARTS):
        new = sorted(set(files[part]) - seen, key=lambda path: (order.get(room(path), 99), path))
        seen |= set(new)
        axes.text(
            column * 4.4,
            1.0,
            f"engine.{part}" if column else "engine(batch)",
            ha="center",
            color=look.ink,
            weight="bold",
        )
        for place, path in enumerate(new):
            y = -place * max(1.0, tallest / max(len(new), 1) * 0.62)
            centres[path] = (column * 4.4, y)
            _box(
                axes, column * 4.4 - 1.75, y - 0.32, 3.5, 0.64, look.parts[column], look, path.removesuffix(".py"), 6.6
            )
    edges = imports()
    for path, (x, y) in centres.items():
        for target in edges[path] & set(centres):
            to_x, to_y = centres[target]
            side = 1.75 if to_x > x else -1.75 if to_x < x else 0.0
            start = (x + side, y) if side else (x + 1.75, y)
            end = (to_x - side, to_y) if side else (to_x + 1.75, to_y)
            curve = "arc3,rad=0" if side else "arc3,rad=-0.35"
            style = {"arrowstyle": "-|>", "color": look.edge, "lw": 0.5, "alpha": 0.55, "connectionstyle": curve}
            axes.annotate("", end, start, arrowprops=style, zorder=1)
    axes.set_xlim(-2.1, 2 * 4.4 + 3.2)
    axes.set_ylim(min(y for _, y in centres.values()) - 0.6, 1.6)


def _box(
    axes: Any, x: float, y: float, width: float, height: float, colour: str, look: Look, text: str, size: float
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=colour, ec=look.edge, lw=0.6, zorder=2))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=size, color=look.ink, zorder=3)


def draw_all(folder: Path = IMAGES) -> list[Path]:
    """Both pictures for each scheme; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    paths = []
    pictures = {"floors": (draw_floors, (11, 9.5)), "step-files": (draw_step, (11, 8.5))}
    for name, (draw, inches) in pictures.items():
        for scheme, look in LOOKS.items():
            with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pictures", "font.family": "DejaVu Sans"}):
                figure, axes = plt.subplots(figsize=inches)
                draw(axes, look)
                axes.axis("off")
                path = folder / f"{name}-{scheme}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
                plt.close(figure)
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
            paths.append(path)
    return paths


if __name__ == "__main__":
    for written in draw_all():
        print(written.relative_to(ROOT))
