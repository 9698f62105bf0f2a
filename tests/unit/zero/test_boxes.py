"""Boxes: any flat range of any box is filled from any other by a few copies, element by element what it should be."""

from __future__ import annotations

import math
import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.zero.layout.placement import Cut, Placement, place, placement_of
from deepspeed.zero.layout.regions import Region, RegionRange, copies, uncovered


@st.composite
def segments_of(draw: st.DrawFn, size: int) -> tuple[tuple[int, int], ...]:
    """Some segments of a dim, in any order, with padding between."""
    edges = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=6)))
    parts = [(low, high - low) for low, high in zip(edges, edges[1:], strict=False) if draw(st.booleans())]
    parts += [(-1, draw(st.integers(1, 3))) for _ in range(draw(st.integers(0, 2)))]
    return tuple(draw(st.permutations(parts))) or ((edges[0], edges[1] - edges[0]),)


@st.composite
def box_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    cuts = tuple(Cut(dim, n, draw(segments_of(n))) for dim, n in enumerate(shape) if draw(st.booleans()))
    local = list(shape)
    for cut in cuts:
        local[cut.dim] = cut.local_size
    return Region.of(Placement(tuple(draw(st.permutations(cuts)))), local)


def local_of(box: Region, whole: torch.Tensor) -> torch.Tensor:
    """The rank's tensor, by hand: padding is zero."""
    made = whole
    for cut in box.cuts:
        blank = torch.zeros_like(made.narrow(cut.dim, 0, 1))
        parts = [
            made.narrow(cut.dim, s, n) if s >= 0 else blank.repeat_interleave(n, dim=cut.dim) for s, n in cut.segments
        ]
        made = torch.cat([made.narrow(cut.dim, 0, 0), *parts], dim=cut.dim)
    return made


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@settings(max_examples=200, deadline=None)
@given(shapes, st.data())
def test_copies_are_those_of_each_element(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    boxes = [data.draw(box_of(shape)) for _ in range(2)]
    flats, ranges = [], []
    for box in boxes:
        flat = local_of(box, whole).reshape(-1)
        assert tuple(local_of(box, whole).shape) == box.local_shape and flat.numel() == box.numel
        start = data.draw(st.integers(0, box.numel))
        stop = data.draw(st.integers(start, box.numel))
        flats.append(flat[start:stop])
        ranges.append(RegionRange(box, start, stop))
    known = set(flats[0].tolist()) - {0}
    wanted = torch.tensor([value if value in known else 0 for value in flats[1].tolist()], dtype=torch.int64)
    for by_rows in (False, True):
        into, filled = torch.zeros_like(wanted), 0
        for one in copies(*ranges):
            filled += one.numel
            if not by_rows:
                one(flats[0], into)
                continue
            for first, distance, there in one.rows(into):
                rows, run = there.shape
                for row in range(rows):
                    begin = first + row * distance
                    there[row].copy_(flats[0][begin : begin + run])
        assert torch.equal(into, wanted)
        # An element that lies twice in the source is copied twice; one that lies once is copied once.
        assert filled >= int((wanted > 0).sum())


@settings(max_examples=80, deadline=None)
@given(shapes, st.data())
def test_a_packed_box_is_the_box_without_padding(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    box = data.draw(box_of(shape))
    flat = local_of(box, whole).reshape(-1)
    assert torch.equal(local_of(box.packed, whole).reshape(-1), flat[flat > 0])
    assert box.packed.packed is box.packed
    for at in range(box.numel + 1):
        assert box.packed_index(at) == int((flat[:at] > 0).sum())


@settings(max_examples=80, deadline=None)
@given(shapes, st.data())
def test_what_no_box_has_is_found(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    boxes = [data.draw(box_of(shape)) for _ in range(data.draw(st.integers(1, 3)))]
    there = set().union(*(local_of(box, whole).reshape(-1).tolist() for box in boxes))
    found = uncovered(boxes)
    if found is None:
        assert there >= set(whole.reshape(-1).tolist())
    else:
        assert int(whole[found]) not in there


def test_equal_boxes_are_equal_however_they_are_told() -> None:
    one = Region.of(Placement((Cut(0, 8, ((0, 2), (2, 2), (-1, 1), (-1, 2))), Cut(1, 4, ((0, 4),)))), (7, 4))
    other = Region.of(Placement((Cut(0, 8, ((0, 4), (-1, 3))),)), (7, 4))
    assert one == other and one.packed == Region((8, 4), (Cut(0, 8, ((0, 4),)),))
    assert Region.of(Placement((Cut(1, 4, ((0, 4), (-1, 1))),)), (3, 5)).packed.whole


def test_a_placed_tensor_is_pickled_with_its_placement() -> None:
    placed = place(torch.nn.Parameter(torch.zeros(2, 3)), Placement((Cut(0, 4, ((2, 2),)),)))
    assert placement_of(pickle.loads(pickle.dumps(placed))) == placement_of(placed)


def test_few_copies_whatever_the_rows() -> None:
    rows = 5000
    halves = [Region((rows, 64), (Cut(1, 64, ((32 * i, 32),)),)) for i in range(2)]
    thirds = Region((rows, 64), (Cut(1, 64, ((20, 24),)),))
    for half in halves:
        found = list(copies(RegionRange(half, 7, rows * 32 - 9), RegionRange(thirds, 11, rows * 24 - 3)))
        assert len(found) <= 9 and max(len(one.sizes) for one in found) == 2
    whole = Region((rows, 64))
    column = Region((rows, 64), (Cut(0, rows, ((1000, 2000),)),))
    (only,) = copies(RegionRange(whole, 0, whole.numel), RegionRange(column, 0, column.numel))
    assert only.sizes == (2000 * 64,)
