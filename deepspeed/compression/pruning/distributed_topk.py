"""Exact selection of the k largest elements over all ranks, by a distributed radix select."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from deepspeed.compression.pruning.sharded_view import Exchange, Owned

_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the parts of a 32-bit number, highest first
_CHUNK = 1 << 16  # scores compared at a time: temporary tensors are eight times as large
Score = Callable[[Owned], torch.Tensor]


def kept_of(total: int, ratio: float) -> int:
    """Return the number of elements that a ratio keeps: total · ratio, rounded up as in upstream DeepSpeed."""
    return min(total, -int(-round(total * ratio, 6) // 1)) if ratio < 1 else total


def ordered(scores: torch.Tensor) -> torch.Tensor:
    """Map fp32 scores to int64 in [0, 2^32) with the same order; NaN is smallest."""
    clean = torch.nan_to_num(scores.to(torch.float32), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    raw = clean.view(torch.int32)
    return (raw ^ ((raw >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def keep_largest(
    sets: Sequence[Sequence[Owned]], keep: Sequence[int], score: Score, exchange: Exchange
) -> Iterator[tuple[str, torch.Tensor]]:
    """Flag the `keep[i]` elements with the highest scores in each list `sets[i]`, over all ranks.

    Of equal scores, the first are kept, in order of parameters and of indices inside a parameter. The flags do not
    depend on the sharding. Collective; every rank must consume the whole iterator.

    Args:
        sets: disjoint lists of parameters, the same on all ranks.
        keep: number of elements to keep in each list.
        score: function of a parameter that returns the scores of this rank's elements [low, high), 1-D.
        exchange: collectives over the ranks that share the parameters.

    Yields:
        Name of each parameter, and bool flags of this rank's elements [low, high).
    """
    thresholds, remaining = [0] * len(sets), list(keep)
    for shift, bits in _DIGITS:
        counts = torch.zeros(len(sets), 1 << bits, dtype=torch.int64)
        for row, params, prefix in zip(counts, sets, thresholds, strict=True):
            for part in (part for param in params for part in param.part(score(param)).split(_CHUNK)):
                numbers = ordered(part)
                numbers = numbers[(numbers >> (shift + bits)) == prefix]
                row += torch.bincount((numbers >> shift) & ((1 << bits) - 1), minlength=1 << bits).cpu()
        table = exchange.sum(counts.view(-1), "counts of a threshold").view(len(sets), -1)
        for index, row in enumerate(table):
            digit, remaining[index] = _find_digit(row, remaining[index])
            thresholds[index] = (thresholds[index] << bits) | digit
    equal = [
        sum(int((ordered(part) == threshold).sum()) for part in param.part(score(param)).split(_CHUNK))
        for params, threshold in zip(sets, thresholds, strict=True)
        for param in params
    ]
    by_rank = iter(exchange.rows(torch.tensor(equal, dtype=torch.int64), "counts of equal scores").t().tolist())
    for params, threshold, wanted in zip(sets, thresholds, remaining, strict=True):
        for param in params:
            counts_by_rank = next(by_rank)
            before = sum(counts_by_rank[: param.axis.rank]) if (param.low, param.high) == param.counted else 0
            yield param.name, _above(score(param), threshold, wanted - before)
            wanted = max(wanted - sum(counts_by_rank), 0)


def _find_digit(counts: torch.Tensor, place: int) -> tuple[int, int]:
    """Return the digit of the `place`-th largest number (from 1), and its place among the numbers with that digit.

    `counts[digit]` is the number of numbers with that digit.
    """
    above = 0
    for digit in range(counts.numel() - 1, -1, -1):
        here = int(counts[digit])
        if above + here >= place:
            return digit, place - above
        above += here
    return 0, 0


def _above(scores: torch.Tensor, threshold: int, equal: int) -> torch.Tensor:
    """Return flags of the scores above a threshold, and of the first `equal` scores equal to it."""
    flags = torch.empty(scores.numel(), dtype=torch.bool, device=scores.device)
    for part, flag in zip(scores.split(_CHUNK), flags.split(_CHUNK), strict=True):
        numbers = ordered(part)
        same = numbers == threshold
        flag.copy_((numbers > threshold) | (same & (torch.cumsum(same, 0) <= equal)))
        equal -= int(same.sum())
    return flags


def largest_units(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """Return bool flags of the `keep` highest of 1-D scores; of equal scores, those with lower indices are kept."""
    order = torch.sort(scores, descending=True, stable=True).indices
    flags = torch.zeros(scores.numel(), dtype=torch.bool)
    flags[order[:keep]] = True
    return flags


def exact_sums(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], units: int, per_unit: int, exchange: Exchange
) -> torch.Tensor:
    """Sum values by unit over all ranks, in fixed point: the result does not depend on the sharding. Collective.

    Args:
        parts: pairs of 1-D tensors: values, and the unit of each value or -1; each element on one rank only.
        units: number of units.
        per_unit: maximum number of elements of one unit.
        exchange: collectives over the ranks that share the values.

    Returns:
        float64 [units]. If a value is infinite or NaN, no sum is finite.
    """
    peaks = [float(values.abs().max()) for values, _ in parts if values.numel()]
    # Python's `max` would lose a NaN that is not the first.
    largest = exchange.max(float(torch.tensor([0.0, *peaks], dtype=torch.float64).max()), "the largest score")
    if largest == 0.0 or largest != largest or largest == float("inf"):
        return torch.full((units,), largest, dtype=torch.float64)
    # 62 bits hold the sum of a unit's elements; 52 keep the conversion from float64 exact.
    room = min(61 - max(per_unit, 1).bit_length(), 52)
    exponent = room - int(torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent)
    sums = torch.zeros(units, dtype=torch.int64)
    for values, unit in parts:
        fixed = torch.ldexp(values.to(torch.float64), torch.tensor(float(exponent))).round().to(torch.int64)
        counted = unit >= 0
        sums.index_add_(0, unit[counted].to(torch.int64).cpu(), fixed[counted].cpu())
    total = exchange.sum(sums, "sums of scores")
    return torch.ldexp(total.to(torch.float64), torch.tensor(float(-exponent)))
