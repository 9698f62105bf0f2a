"""Regions of a global tensor: the elements that a rank has, and copies between regions, for resharding of checkpoints.

A rank's tensor is a region of the global one: each dimension is complete, or split into segments, possibly with padding
between them. ZeRO shards the flattened region further. `copies` computes the strided copies from a range of one
flattened region to a range of another; their number does not depend on the number of rows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from deepspeed.zero.layout.placement import Cut, Placement

Segments = tuple[tuple[int, int], ...]  # see `Cut.segments`


@dataclass(frozen=True)
class Region:
    """Region of a global tensor that a rank has.

    Args:
        shape: shape of the global tensor.
        cuts: segments of the split dimensions, sorted by dimension.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    @staticmethod
    def of(placement: Placement, local: Sequence[int]) -> Region:
        """Create the region of a tensor.

        Args:
            placement: placement of the tensor.
            local: shape of this rank's tensor.

        Raises:
            ArgumentError: the placement does not match the shape.
        """
        return Region(placement.global_shape(tuple(local)), tuple(Region._plain_cuts(placement.cuts)))

    @staticmethod
    def _plain_cuts(cuts: Sequence[Cut]) -> Iterator[Cut]:
        """Normalize cuts: sort them, join adjacent segments, omit complete dimensions."""
        for cut in sorted(cuts, key=lambda part: part.dim):
            joined: list[tuple[int, int]] = []
            for start, length in cut.segments:
                last, had = joined[-1] if joined else (-2, 0)
                if joined and (start == last == -1 or (last >= 0 and start == last + had)):
                    joined[-1] = (last, had + length)
                else:
                    joined.append((start, length))
            if joined != [(0, cut.size)]:
                yield Cut(cut.dim, cut.size, tuple(joined))

    @cached_property
    def segments(self) -> tuple[Segments, ...]:
        cut = {axis_cut.dim: axis_cut.segments for axis_cut in self.cuts}
        return tuple(cut.get(dim, ((0, size),)) for dim, size in enumerate(self.shape))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in segments) for segments in self.segments)

    @property
    def numel(self) -> int:
        """Return the number of elements of the rank's tensor, including padding."""
        return math.prod(self.local_shape)

    @property
    def whole(self) -> bool:
        return not self.cuts

    @cached_property
    def packed(self) -> Region:
        """Return the region without padding, as in checkpoint files."""
        if all(cut.padding == 0 for cut in self.cuts):
            return self
        real = [Cut(c.dim, c.size, tuple(s for s in c.segments if s[0] >= 0)) for c in self.cuts]
        return Region(self.shape, tuple(Region._plain_cuts(real)))

    def packed_index(self, index: int) -> int:
        """Return the number of elements before element `index` of the flattened region, without padding."""
        if self.packed is self:
            return index
        local, real = self.local_shape, [self._real(segments, None) for segments in self.segments]
        count, coordinates = 0, []
        for size in reversed(local):
            index, coordinate = divmod(index, size) if size else (0, 0)
            coordinates.append(coordinate)
        if index:
            return math.prod(real)
        for dim, coordinate in enumerate(reversed(coordinates)):
            inside = math.prod(real[dim + 1 :])
            count += self._real(self.segments[dim], coordinate) * inside
            if self._real(self.segments[dim], coordinate + 1) == self._real(self.segments[dim], coordinate):
                break  # the index is in padding, so inner dimensions have no elements before it
        return count

    @staticmethod
    def _real(segments: Segments, end: int | None) -> int:
        """Count the positions of a dimension that are not padding, among the first `end` (None: among all)."""
        count = position = 0
        for start, length in segments:
            inside = length if end is None else min(max(end - position, 0), length)
            count, position = count + (inside if start >= 0 else 0), position + length
        return count


@dataclass(frozen=True)
class Copy:
    """Strided copy of a block of elements from one 1-D tensor to another.

    Args:
        sizes: shape of the block.
        source: index of the block's first element in the source.
        source_strides: stride of each dimension in the source, in elements.
        into: index of the block's first element in the destination.
        into_strides: stride of each dimension in the destination, in elements.
    """

    sizes: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    into: int
    into_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def source_end(self) -> int:
        """Return the index after the last element in the source."""
        steps = zip(self.sizes, self.source_strides, strict=True)
        return self.source + sum((size - 1) * stride for size, stride in steps) + 1

    def __call__(self, source: torch.Tensor, into: torch.Tensor, add: float | None = None) -> None:
        """Copy the block.

        Args:
            source: 1-D tensor.
            into: 1-D tensor, changed in place.
            add: factor with which the source is added to the destination; None: overwrite.
        """
        values = self._strided(source, self.sizes, self.source_strides, self.source)
        there = self._strided(into, self.sizes, self.into_strides, self.into)
        if add is None:
            there.copy_(values)
        else:
            there.add_(values.to(there.device), alpha=add)  # result in the destination's dtype

    @classmethod
    def collapsed(
        cls, sizes: list[int], source: int, source_strides: list[int], into: int, into_strides: list[int]
    ) -> Copy:
        """Create a copy with the minimum number of dimensions; arguments are those of the class."""
        dims: list[list[int]] = []
        for size, a, b in zip(sizes, source_strides, into_strides, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * a and dims[-1][2] == size * b:
                dims[-1] = [dims[-1][0] * size, a, b]
            else:
                dims.append([size, a, b])
        counts, source_strides_left, theirs_left = zip(*(dims or [[1, 1, 1]]), strict=True)
        return cls(counts, source, source_strides_left, into, theirs_left)

    @staticmethod
    def _strided(tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
        step = tensor.stride(0)
        return tensor.as_strided(sizes, [step * stride for stride in strides], tensor.storage_offset() + step * offset)

    def rows(self, into: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Divide the copy into blocks of equidistant rows that are contiguous in the source.

        Args:
            into: 1-D destination.

        Yields:
            Index of the first element in the source, distance of the rows in the source, and destination (2-D view:
            one row per row of the source).
        """
        sizes, ours, into_strides = self.sizes, self.source_strides, self.into_strides
        if ours[-1] != 1:  # rows of one element
            sizes, ours, into_strides = (*sizes, 1), (*ours, 1), (*into_strides, 1)
        if len(sizes) == 1:
            sizes, ours, into_strides = (1, *sizes), (0, *ours), (0, *into_strides)
        for indices in itertools.product(*map(range, sizes[:-2])):
            first = self.source + sum(i * stride for i, stride in zip(indices, ours, strict=False))
            place = self.into + sum(i * stride for i, stride in zip(indices, into_strides, strict=False))
            yield first, ours[-2], self._strided(into, sizes[-2:], into_strides[-2:], place)


@dataclass(frozen=True)
class RegionRange:
    """Elements [start, stop) of a flattened region, including padding."""

    box: Region
    start: int
    stop: int

    @property
    def real_numel(self) -> int:
        return self.box.packed_index(self.stop) - self.box.packed_index(self.start)


def copies(source: RegionRange, into: RegionRange) -> Iterator[Copy]:
    """Yield the copies from a range of one region to a range of another; elements in only one range are skipped.

    Args:
        source: range that a 1-D source tensor contains.
        into: range that a 1-D destination tensor contains.
    """
    if source.box == into.box and source.box.packed is source.box:
        low, high = max(source.start, into.start), min(source.stop, into.stop)
        if low < high:
            yield Copy((high - low,), low - source.start, (1,), low - into.start, (1,))
        return
    shapes, strides, cells = _common(source.box, into.box)
    if not cells:
        return
    rects = [_rects(shapes[0], source.start, source.stop), _rects(shapes[1], into.start, into.stop)]
    for cell, (a, b) in itertools.product(cells, list(itertools.product(*rects))):
        overlap = _meet(cell, a, b)
        if overlap is not None:
            (here, there), counts = overlap
            first = sum(i * stride for i, stride in zip(here, strides[0], strict=True)) - source.start
            place = sum(i * stride for i, stride in zip(there, strides[1], strict=True)) - into.start
            yield Copy.collapsed(counts, first, strides[0], place, strides[1])


def extent(box: Region, wanted: RegionRange) -> tuple[int, int]:
    """Return the smallest range of a flattened region with all elements that it shares with another range.

    Args:
        box: region.
        wanted: range of another region of the same global tensor.

    Returns:
        Start and stop; (0, 0) if they share no elements.
    """
    every = RegionRange(wanted.box, 0, wanted.box.numel)
    return _full_extent(box, wanted.box) if wanted == every else _extent(box, wanted)


def _extent(box: Region, wanted: RegionRange) -> tuple[int, int]:
    ends = [(copy.source, copy.source_end) for copy in copies(RegionRange(box, 0, box.numel), wanted)]
    return min((first for first, _ in ends), default=0), max((last for _, last in ends), default=0)


@lru_cache(maxsize=4096)
def _full_extent(box: Region, other: Region) -> tuple[int, int]:
    return _extent(box, RegionRange(other, 0, other.numel))


_Cell = tuple[tuple[int, int, int], ...]  # by dimension: start in the source, start in the destination, length
_Rect = list[tuple[int, int]]  # by dimension: start, stop


@lru_cache(maxsize=4096)
def _common(a: Region, b: Region) -> tuple[list[list[int]], list[list[int]], list[_Cell]]:
    """Return shapes and strides of two regions in the minimum number of dimensions, and the blocks that they share."""
    cut = {axis_cut.dim for axis_cut in (*a.cuts, *b.cuts)}
    dims: list[tuple[int, int]] = []  # (dimension, size of following complete dimensions, which are merged into it)
    for dim, size in enumerate(a.shape):
        if dim in cut or not dims:
            dims.append((dim, 1))
        else:
            dims[-1] = (dims[-1][0], dims[-1][1] * size)
    segments: list[list[Segments]] = [
        [tuple((s * unit if s >= 0 else -1, n * unit) for s, n in box.segments[dim]) for dim, unit in dims]
        or [((0, 1),)]  # 0-d tensor
        for box in (a, b)
    ]
    shapes = [[sum(length for _, length in of_dim) for of_dim in by_dim] for by_dim in segments]
    strides = [list(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1] for shape in shapes]
    common = [list(_overlaps(ours, other_segments)) for ours, other_segments in zip(*segments, strict=True)]
    return shapes, strides, list(itertools.product(*common))


def _overlaps(ours: Segments, other_segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Yield the overlaps of two regions along a dimension: (start in the first, start in the second, length)."""
    here = 0
    for a, length in ours:
        there = 0
        for b, other in other_segments:
            low, high = max(a, b), min(a + length, b + other)
            if a >= 0 and b >= 0 and low < high:
                yield here + low - a, there + low - b, high - low
            there += other
        here += length


def _rects(shape: Sequence[int], start: int, stop: int) -> list[_Rect]:
    """Divide the elements [start, stop) of a flattened tensor into rectangular blocks, at most two per dimension."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [[(start, stop)]]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        return [[(first, first + 1), *rest] for rest in _rects(shape[1:], start - first * inner, stop - first * inner)]
    rects: list[_Rect] = []
    if start % inner:
        rects += _rects(shape, start, (first + 1) * inner)
        first += 1
    whole = stop // inner
    if first < whole:
        rects.append([(first, whole), *((0, size) for size in shape[1:])])
    if stop % inner:
        rects += _rects(shape, whole * inner, stop)
    return rects


def _meet(cell: _Cell, a: _Rect, b: _Rect) -> tuple[tuple[list[int], list[int]], list[int]] | None:
    """Intersect a shared block with a block of the source and one of the destination.

    Returns start indices in source and destination, and the shape; None if the intersection is empty.
    """
    here, there, counts = [], [], []
    for (ours, other_start, length), (a_low, a_high), (b_low, b_high) in zip(cell, a, b, strict=True):
        low, high = max(0, a_low - ours, b_low - other_start), min(length, a_high - ours, b_high - other_start)
        if low >= high:
            return None
        here.append(ours + low)
        there.append(other_start + low)
        counts.append(high - low)
    return (here, there), counts


def uncovered(boxes: Sequence[Region]) -> tuple[int, ...] | None:
    """Find an element that no region contains.

    Args:
        boxes: regions of the same global tensor; at least one.

    Returns:
        Index of the first such element; None if there is none.
    """
    edges = [
        sorted({0, size, *(edge for box in boxes for s, n in box.segments[dim] if s >= 0 for edge in (s, s + n))})
        for dim, size in enumerate(boxes[0].shape)
    ]
    there = torch.zeros([max(len(edge) - 1, 0) for edge in edges], dtype=torch.bool)
    for box in boxes:
        for cell in itertools.product(*box.segments):
            if all(start >= 0 for start, _ in cell):
                spans = zip(cell, edges, strict=True)
                there[tuple(slice(edge.index(s), edge.index(s + n)) for (s, n), edge in spans)] = True
    gaps = (~there).nonzero()
    return tuple(edges[dim][i] for dim, i in enumerate(gaps[0].tolist())) if len(gaps) else None
