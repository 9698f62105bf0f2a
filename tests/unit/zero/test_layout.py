"""Layouts: every element has one owner, pieces and cuts agree, slices are even and aligned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.zero.layout.layout import ALIGN, ParamRange, ShardLayout, by_group, by_owner

SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=8)
RANKS = st.integers(1, 7)
MAKERS = st.sampled_from([by_group, by_owner])


@given(MAKERS, SIZES, RANKS)
def test_every_element_has_one_owner(make, numels: list[int], ranks: int) -> None:
    layout = make(numels, ranks)
    assert layout.ranks == ranks and layout.cuts[0] == 0 and list(layout.cuts) == sorted(layout.cuts)
    assert layout.padded >= layout.numel == sum(numels)
    assert sum(layout.shard_numel(rank) for rank in range(ranks)) == layout.padded
    owned: list[list[int]] = [[] for _ in numels]
    for rank in range(ranks):
        at = layout.cuts[rank]
        for piece in layout.ranges(rank):
            assert piece.group_start >= at and piece.group_start == layout.offsets[piece.index] + piece.start
            at = piece.group_start + piece.numel
            assert at <= layout.cuts[rank + 1]
            owned[piece.index] += range(piece.start, piece.stop)
    assert owned == [list(range(numel)) for numel in numels]


@given(MAKERS, SIZES, RANKS)
def test_cuts_of_a_parameter_are_its_ranges(make, numels: list[int], ranks: int) -> None:
    layout = make(numels, ranks)
    for index, numel in enumerate(numels):
        cuts = layout.cuts_of(index)
        assert cuts[0] == 0 and cuts[-1] == numel
        for rank in range(ranks):
            found = [(p.start, p.stop) for p in layout.ranges(rank) if p.index == index]
            assert found == ([(cuts[rank], cuts[rank + 1])] if cuts[rank] < cuts[rank + 1] else [])


@given(SIZES, RANKS)
def test_by_group_is_even_and_aligned(numels: list[int], ranks: int) -> None:
    layout = by_group(numels, ranks)
    slices = {layout.shard_numel(rank) for rank in range(ranks)}
    assert len(slices) == 1
    if sum(numels) >= ranks * ALIGN:
        assert slices.pop() % ALIGN == 0
    assert layout.padded - layout.numel < ranks * ALIGN


@given(SIZES, RANKS)
def test_by_owner_never_cuts_a_parameter(numels: list[int], ranks: int) -> None:
    layout = by_owner(numels, ranks)
    assert layout.padded == layout.numel
    for rank in range(ranks):
        assert all(p.numel == numels[p.index] for p in layout.ranges(rank))


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 10, [ParamRange(0, 0, 4, 0), ParamRange(1, 0, 6, 4)]),
        (3, 5, [ParamRange(0, 3, 4, 3), ParamRange(1, 0, 1, 4)]),
        (4, 4, []),
        (9, 99, [ParamRange(1, 5, 6, 9)]),
    ],
)
def test_ranges_within(low: int, high: int, wanted: list[ParamRange]) -> None:
    assert ShardLayout((4, 6), (0, 5, 10)).ranges_within(low, high) == wanted
