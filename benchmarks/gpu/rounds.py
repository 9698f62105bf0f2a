"""Sides of one comparison, timed in turn: rounds, each with every side once in a drawn order, and ratios by round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import median_interval

Side = Callable[[], float]  # seconds of one turn


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of a call, with what it started on the device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def compare(
    sides: dict[str, Side], reference: str, seconds: float, fewest: int, most: int = 15
) -> list[dict[str, Any]]:
    """Return a record for each side: milliseconds and the paired ratio to the reference, with its 95 % interval.

    Args:
        sides: the sides; each answers with the seconds of its turn.
        reference: the side that others are divided by.
        seconds: after which no further round begins.
        fewest: rounds that are taken in any case, behind one that is not counted.
        most: rounds at most.
    """
    order, until = random.Random(0), time.perf_counter() + seconds
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(most + 1):
        if number > fewest and time.perf_counter() > until:
            break
        for name in order.sample(list(sides), len(sides)):
            took = max(sides[name](), 1e-9)
            if number:
                times[name].append(took)
    return [_record(name, reference, times) for name in sides]


def _record(name: str, reference: str, times: dict[str, list[float]]) -> dict[str, Any]:
    ratio = median_interval([own / other for own, other in zip(times[name], times[reference], strict=True)])
    return {"side": name, "reference": reference, "ms": 1e3 * statistics.median(times[name]), "rounds": ratio.count,
            "ratio": ratio.median, "low": ratio.low, "high": ratio.high}  # fmt: skip
