"""Pairwise covers: few choices of several options in which any two values of different options meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def pairwise(options: dict[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """A list of choices in which every pair of values of two options occurs together, drawn greedily."""
    draw, names = random.Random(seed), list(options)
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    chosen: list[dict[str, Any]] = []
    while pairs:
        a, i, b, j = min(pairs)
        best: dict[str, int] = {}
        most: set[Any] = set()
        for _ in range(40):
            tried = {name: draw.randrange(len(options[name])) for name in names} | {a: i, b: j}
            covered = pairs & {(x, tried[x], y, tried[y]) for x, y in itertools.combinations(names, 2)}
            if len(covered) > len(most):
                best, most = tried, covered
        pairs -= most
        chosen.append({name: options[name][index] for name, index in best.items()})
    return chosen
