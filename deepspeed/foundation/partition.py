"""Partition of a list of items into parts of about equal weight, such as layers over pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from deepspeed.errors import ArgumentError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Partition `num_items` into ranges with lengths that differ by at most one, longer ones first.

    Args:
        num_items: number of items.
        num_parts: number of parts; if there are more parts than items, the last ones are empty.

    Returns:
        `num_parts` + 1 bounds: part i has the items from bounds[i] up to bounds[i + 1].

    Raises:
        ArgumentError: `num_parts` is below 1.
    """
    _check(num_parts)
    length, longer = divmod(num_items, num_parts)
    return [part * length + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Partition a list so that the heaviest part is as light as possible.

    Bisection finds the smallest limit for which greedy filling works (the linear partition problem).

    Args:
        weights: the weight of each item; not negative.
        num_parts: number of parts; if there are more parts than items, the last ones are empty.

    Returns:
        `num_parts` + 1 bounds, as in `partition_uniform`.

    Raises:
        ArgumentError: `num_parts` is below 1.
    """
    _check(num_parts)
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0.0, *accumulate(weights)]
    low, high = max(max(weights), sums[-1] / num_parts), sums[-1]
    bounds = _fill(sums, num_parts, high)
    while low < (middle := (low + high) / 2) < high:  # until no number lies between them
        tried = _fill(sums, num_parts, middle)
        if tried[-1] == len(weights):
            bounds, high = tried, middle
        else:
            low = middle
    return bounds


def _fill(sums: list[float], num_parts: int, limit: float) -> list[int]:
    """Return bounds of parts filled up to `limit`, with an item left for each later part; the last items may remain."""
    bounds, last = [0], len(sums) - 1
    for later in reversed(range(num_parts)):
        start = end = bounds[-1]
        while end < last - later and sums[end + 1] - sums[start] <= limit:
            end += 1
        bounds.append(end)
    return bounds


def _check(num_parts: int) -> None:
    if num_parts < 1:
        raise ArgumentError(f"num_parts is {num_parts}; a row is split into at least one part")
