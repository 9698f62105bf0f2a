"""Shard layout of a parameter group: the elements of the concatenated parameters that each rank owns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

# Alignment of shard boundaries, in elements, for vectorized loads.
ALIGN = 8


@dataclass(frozen=True)
class ParamRange:
    """Range of elements of one parameter in a shard.

    Args:
        index: index of the parameter in the group.
        start: index of the first element in the flattened parameter.
        stop: index after the last element in the flattened parameter.
        group_start: index of the first element in the group's concatenated parameters.
    """

    index: int
    start: int
    stop: int
    group_start: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ShardLayout:
    """Sizes of a group's concatenated parameters, and boundaries of its shards.

    Args:
        numels: number of elements of each parameter, in order.
        cuts: (number of ranks) + 1 boundaries: rank r owns [cuts[r], cuts[r + 1]). Elements after the last parameter
            are padding.
    """

    numels: tuple[int, ...]
    cuts: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the index in the group of the first element of each parameter."""
        return (0, *accumulate(self.numels))[:-1]

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Return the boundaries of parameters and padding in the full buffer, from 0 to its number of elements."""
        return tuple(sorted({0, *self.offsets, self.numel, self.padded}))

    @cached_property
    def numel(self) -> int:
        """Return the number of elements of all parameters, without padding."""
        return sum(self.numels)

    @cached_property
    def padded(self) -> int:
        """Return the number of elements of the full buffer, with padding."""
        return max(self.cuts[-1], self.numel)

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    def shard_numel(self, rank: int) -> int:
        return self.cuts[rank + 1] - self.cuts[rank]

    def ranges(self, rank: int) -> list[ParamRange]:
        """Return the range of each parameter that has elements in a rank's shard, in order."""
        return self.ranges_within(self.cuts[rank], self.cuts[rank + 1])

    def ranges_within(self, low: int, high: int) -> list[ParamRange]:
        """Return the range of each parameter that has elements in [low, high) of the group, in order."""
        first = max(bisect_right(self.offsets, low) - 1, 0)  # parameter with element `low`
        ranges = (self.range_of(i, low, high) for i in range(first, bisect_left(self.offsets, high)))
        return [range_ for range_ in ranges if range_ is not None]

    def range_of(self, index: int, low: int, high: int) -> ParamRange | None:
        """Return the range of parameter `index` in [low, high) of the group; None if it has no elements there."""
        offset = self.offsets[index]
        start, stop = max(low, offset), min(high, offset + self.numels[index])
        return ParamRange(index, start - offset, stop - offset, start) if start < stop else None

    def cuts_of(self, index: int) -> tuple[int, ...]:
        """Return the shard boundaries c within the flattened parameter `index`: rank r has [c[r], c[r + 1])."""
        offset, numel = self.offsets[index], self.numels[index]
        return tuple(min(max(cut - offset, 0), numel) for cut in self.cuts)


def by_group(numels: Sequence[int], ranks: int) -> ShardLayout:
    """Divide a group into equal shards, with padding at the end.

    Args:
        numels: number of elements of each parameter.
        ranks: number of ranks.
    """
    total = sum(numels)
    step = -(-total // ranks)
    if total >= ranks * ALIGN:
        step = -(-step // ALIGN) * ALIGN
    return ShardLayout(tuple(numels), tuple(step * r for r in range(ranks + 1)))


def by_owner(numels: Sequence[int], ranks: int) -> ShardLayout:
    """Divide a group between parameters only, into shards of similar size; arguments as in `by_group`.

    For optimizers whose update of a parameter needs all its elements (Muon, LAMB, Adafactor).
    """
    edges = [0, *accumulate(numels)]
    total, cuts = edges[-1], [0]
    for r in range(1, ranks):
        ideal = total * r / ranks
        edge_index = bisect_left(edges, ideal)
        nearest = min(edges[max(edge_index - 1, 0) : edge_index + 1], key=lambda edge: abs(edge - ideal))
        cuts.append(max(nearest, cuts[-1]))
    return ShardLayout(tuple(numels), (*cuts, total))


def by_first(numels: Sequence[int], ranks: int) -> ShardLayout:
    """Assign all parameters to rank 0; arguments as in `by_group`.

    For optimizers whose update of a parameter depends on all parameters (Prodigy, SAM).
    """
    return ShardLayout(tuple(numels), (0, *[sum(numels)] * ranks))
