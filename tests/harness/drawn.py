"""Which cells of a table run in `make test`: a few drawn ones. All others are slow."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import pytest


def drawn(ids: Sequence[str], count: int) -> list[str]:
    """That many of the cells of a table, always the same ones.

    Each next one has the most values that no earlier one has, so that every value of every parameter is among them
    as far as the number goes. Where several have as many, a hash decides.
    """
    values = {cell: set(enumerate(re.split(r"[^\w]+", cell))) for cell in ids}
    left = sorted(ids, key=lambda cell: hashlib.sha256(cell.encode()).digest())
    chosen: list[str] = []
    seen: set[tuple[int, str]] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda cell: len(values[cell] - seen))
        left.remove(best)
        chosen.append(best)
        seen |= values[best]
    return chosen


def mark_others_slow(items: Sequence[pytest.Item]) -> None:
    """Marks what `pytest.mark.drawn(count)` leaves out of each test; cells that are slow anyway do not count."""
    tables: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn") and not item.get_closest_marker("slow"):
            table, _, cell = item.nodeid.partition("[")
            tables.setdefault(table, {})[cell] = item
    for cells in tables.values():
        mark = next(iter(cells.values())).get_closest_marker("drawn")
        assert mark is not None
        chosen = set(drawn(list(cells), mark.args[0]))
        for cell, item in cells.items():
            if cell not in chosen:
                item.add_marker(pytest.mark.slow)
