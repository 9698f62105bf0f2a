"""The table of docs/rooms.md: a room has no more lines, and no more definitions per 1,000 lines, than its row says."""

from __future__ import annotations

import re

from tests.architecture.measure import measure, package_at
from tests.architecture.sources import ROOT

PAGE = ROOT / "docs" / "rooms.md"
ROWS = {
    room: (int(lines.replace(",", "")), float(density))
    for room, lines, density in re.findall(r"^\| (\S+) \| ([\d,]+) \| ([\d.]+) \|", PAGE.read_text(), re.M)
}


def test_every_room_is_within_its_row() -> None:
    figures = {room: row for room, row in measure(package_at(None)).items() if room not in ("all", "(top)")}
    assert set(figures) == set(ROWS)
    over = [
        f"{room}: {row['lines']:,} lines, {row['per 1,000']} definitions per 1,000; its row says {ROWS[room]}"
        for room, row in figures.items()
        if row["lines"] > ROWS[room][0] or row["per 1,000"] > ROWS[room][1]
    ]
    assert not over, "\n".join(["a room grows with a row of docs/rooms.md that says what came", *over])
