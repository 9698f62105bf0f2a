"""The table and the pictures of a folder, from its rows alone: `report.md`, and a picture for each part with sides."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import PARTS, Part
from benchmarks.gpu.results import Facts, Key, Results

REPORT = "report.md"
EXTRAS = ("first ms", "of the floor", "tokens per second", "GiB", "measured ms")
LABELS = {
    "generation": "time over the reference of its row (Transformers, greedy choice, bf16)",
    "training": "time of a step over the first side's",
    "simulator": "simulated over measured time",
}


def write(folder: Path) -> list[Path]:
    """Write the report and the pictures of a folder; returns their paths."""
    rows = Results(folder).rows()
    drawn = {part.name: path for part in PARTS if (path := _draw(folder, part, rows)) is not None}
    lines = [f"# {folder.name}", "", _heading(rows), ""]
    for part in PARTS:
        lines += _part(part, rows, drawn.get(part.name))
    path = folder / REPORT
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n")
    return [path, *drawn.values()]


def _heading(rows: dict[Key, Facts]) -> str:
    """When, from which trees, and what is not there."""
    dates = sorted({datetime.date.fromtimestamp(line["when"]).isoformat() for line in rows.values()})
    trees = sorted({line["sources"] for line in rows.values() if "sources" in line})
    wanted = [(part.name, row.key) for part in PARTS for row in part.rows]
    states: dict[str, int] = {}
    for key in wanted:
        state = rows[key]["state"] if key in rows else "not measured"
        states[state] = states.get(state, 0) + 1
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    emulated = " **Emulated device: its times say nothing.**" if _emulated(rows) else ""
    return (
        f"{len(wanted)} rows: {counts}. {', '.join(dates) or 'no date'}; sources {', '.join(trees) or '-'}.{emulated}"
    )


def _emulated(rows: dict[Key, Facts]) -> bool:
    return rows.get(("environment", "machine"), {}).get("card") == "emulated"


def _part(part: Part, rows: dict[Key, Facts], picture: Path | None) -> list[str]:
    lines = [f"## {part.name}", "", f"{part.shows}.", "", "| row | state | seconds | result |", "|---|---|--:|---|"]
    for row in part.rows:
        line = rows.get((part.name, row.key), {"state": "not measured"})
        seconds = f"{line['seconds']:.1f}" if "seconds" in line else ""
        lines.append(f"| {row.key} | {line['state']} | {seconds} | {line.get('says', '').replace('|', '/')} |")
    sides = [(row.key, side) for row in part.rows for side in rows.get((part.name, row.key), {}).get("sides", [])]
    if sides:
        extras = [name for name in EXTRAS if any(name in side for _, side in sides)]
        lines += ["", f"| row | side | ms | ratio [95 %] | to | rounds | {' | '.join(extras)}{' |' if extras else ''}"]
        lines.append("|---|---|--:|--:|---|--:|" + "--:|" * len(extras))
        lines += [_side(key, side, extras) for key, side in sides]
    if picture is not None:
        lines += ["", f"![{part.name}]({picture.name})"]
    return [*lines, ""]


def _side(key: str, side: dict[str, Any], extras: list[str]) -> str:
    ratio = f"{side['ratio']:.3f} [{side['low']:.3f}, {side['high']:.3f}]"
    more = "".join(f" {side[name]:,.2f} |" if name in side else " |" for name in extras)
    return f"| {key} | {side['side']} | {side['ms']:.2f} | {ratio} | {side['reference']} | {side['rounds']} |{more}"


def _draw(folder: Path, part: Part, rows: dict[Key, Facts]) -> Path | None:
    """Draw the ratios of a part's sides; None where it has none."""
    names, records = [], []
    for row in part.rows:
        for side in rows.get((part.name, row.key), {}).get("sides", []):
            if side["side"] != side["reference"]:
                names.append(f"{row.key}: {side['side']}")
                known = math.isfinite(side["high"])  # too few rounds have no interval
                records.append(side if known else side | {"low": side["ratio"], "high": side["ratio"]})
    if not records:
        return None
    from benchmarks.common import draw_ratios

    path = folder / f"{part.name}.png"
    note = "EMULATED, no times of a card\n" if _emulated(rows) else ""
    draw_ratios(names, records, f"{note}{LABELS.get(part.name, 'ratio')}\n", path)
    return path
