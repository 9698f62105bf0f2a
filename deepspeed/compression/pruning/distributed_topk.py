"""The exact k largest elements over all ranks, by a distributed radix select."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from deepspeed.compression.pruning.sharded_view import Exchange, Owned

_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the parts of a 32-bit number, highest first
_CHUNK = 1 << 16  # scores that are looked at together: what is made of them is eight times as large
Score = Callable[[Owned], torch.Tensor]


def kept_of(total: int, ratio: float) -> int:
    """How many of `total` a ratio keeps: rounded up, as the published interface does."""
    return min(total, -int(-round(total * ratio, 6) // 1)) if ratio < 1 else total


def ordered(scores: torch.Tensor) -> torch.Tensor:
    """Scores as int64 in [0, 2^32) of the same order; what is not a number comes first."""
    clean = torch.nan_to_num(scores.to(torch.float32), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    raw = clean.view(torch.int32)
    return (raw ^ ((raw >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def keep_largest(
    sets: Sequence[Sequence[Owned]], keep: Sequence[int], score: Score, exchange: Exchange
) -> Iterator[tuple[str, torch.Tensor]]:
    """Flags of the `keep[i]` highest scores among all elements of the parameters in `sets[i]`.

    Equal scores: those of the earlier parameter, and in it those at the lower index, are kept first. The flags are the
    same however the parameters are cut. All ranks call together, and take all that is given.

    Args:
        sets: disjoint lists of parameters, the same on all ranks.
        keep: how many stay in each.
        score: 1-D over [low, high) of a parameter.
        exchange: the ranks.

    Yields:
        The parameter's name, 1-D bool over [low, high).
    """
    prefixes, remaining = [0] * len(sets), list(keep)
    for shift, bits in _DIGITS:
        counts = torch.stack(
            [_counts(owned, score, prefix, (shift, bits)) for owned, prefix in zip(sets, prefixes, strict=True)]
        )
        table = exchange.sum(counts.view(-1), "counts of a threshold").view(len(sets), -1)
        for at, row in enumerate(table):
            digit, remaining[at] = _digit(row, remaining[at])
            prefixes[at] = (prefixes[at] << bits) | digit
    yield from _flags(sets, prefixes, remaining, score, exchange)


def _counts(owned: Sequence[Owned], score: Score, prefix: int, digit: tuple[int, int]) -> torch.Tensor:
    shift, bits = digit
    found = torch.zeros(1 << bits, dtype=torch.int64)
    for one in owned:
        for part in one.part(score(one)).split(_CHUNK):
            numbers = ordered(part)
            numbers = numbers[(numbers >> (shift + bits)) == prefix]
            found += torch.bincount((numbers >> shift) & ((1 << bits) - 1), minlength=1 << bits).cpu()
    return found


def _digit(counts: torch.Tensor, wanted: int) -> tuple[int, int]:
    """The digit of the wanted-th largest, and how many are still wanted among those that have it."""
    above = 0
    for digit in range(counts.numel() - 1, -1, -1):
        here = int(counts[digit])
        if above + here >= wanted:
            return digit, wanted - above
        above += here
    return 0, 0


def _flags(
    sets: Sequence[Sequence[Owned]], thresholds: list[int], remaining: list[int], score: Score, exchange: Exchange
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is above the threshold, and the first of what is equal to it."""
    equal = [
        torch.tensor([_count(one.part(score(one)), level) for one in owned], dtype=torch.int64)
        for owned, level in zip(sets, thresholds, strict=True)
    ]
    table = exchange.rows(torch.cat(equal), "counts of equal scores")
    at = 0
    for owned, level, wanted in zip(sets, thresholds, remaining, strict=True):
        left = wanted
        for one in owned:
            by_rank = table[:, at].tolist()
            at += 1
            before = sum(by_rank[: one.axis.rank]) if (one.low, one.high) == one.counted else 0
            yield one.name, _above(score(one), level, left - before)
            left = max(left - sum(by_rank), 0)


def _count(scores: torch.Tensor, level: int) -> int:
    return sum(int((ordered(part) == level).sum()) for part in scores.split(_CHUNK))


def _above(scores: torch.Tensor, level: int, wanted: int) -> torch.Tensor:
    """Flags of what is above a level, and of the first `wanted` that are on it."""
    flags = torch.empty(scores.numel(), dtype=torch.bool, device=scores.device)
    for part, flag in zip(scores.split(_CHUNK), flags.split(_CHUNK), strict=True):
        numbers = ordered(part)
        same = numbers == level
        flag.copy_((numbers > level) | (same & (torch.cumsum(same, 0) <= wanted)))
        wanted -= int(same.sum())
    return flags


def largest_units(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """Flags of the `keep` highest of replicated scores, the lower index first among equals.

    Args:
        scores: 1-D.
        keep: how many.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    flags = torch.zeros(scores.numel(), dtype=torch.bool)
    flags[order[:keep]] = True
    return flags


def exact_sums(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], units: int, per_unit: int, exchange: Exchange
) -> torch.Tensor:
    """Sums by unit that are the same however elements are cut: of numbers in fixed point, so that order is nothing.

    Args:
        parts: (values, unit of each or -1), 1-D, counted once over all ranks.
        units: how many.
        per_unit: most elements of one unit.
        exchange: the ranks.

    Returns:
        float64 [units].
    """
    largest = max((float(values.abs().max()) for values, _ in parts if values.numel()), default=0.0)
    largest = exchange.max(largest, "the largest score")
    if largest == 0.0 or largest != largest or largest == float("inf"):
        return torch.full((units,), largest, dtype=torch.float64)
    # 62 bits hold the largest number as often as a unit has elements; 52 keep the conversion from float64 exact.
    room = min(61 - max(per_unit, 1).bit_length(), 52)
    exponent = room - int(torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent)
    sums = torch.zeros(units, dtype=torch.int64)
    for values, unit in parts:
        fixed = torch.ldexp(values.to(torch.float64), torch.tensor(float(exponent))).round().to(torch.int64)
        there = unit >= 0
        sums.index_add_(0, unit[there].to(torch.int64).cpu(), fixed[there].cpu())
    total = exchange.sum(sums, "sums of scores")
    return torch.ldexp(total.to(torch.float64), torch.tensor(float(-exponent)))
