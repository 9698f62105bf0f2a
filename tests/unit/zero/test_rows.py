"""Gradients of tables by rows: found, summed, and added to where they belong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.zero.gradients.row_exchange import find_tables, nonzero_rows, sum_rows, write_rows
from deepspeed.zero.gradients.sparse_rows import add_rows

ROWS, WIDTH, HITS = 100, 16, 512


def gradient_of(dtype: torch.dtype, sparse: bool) -> torch.Tensor:
    """Of a table of which four rows are looked up very often; the same gradients in every dtype."""
    draw = torch.Generator().manual_seed(0)
    looked_up = torch.randint(0, 4, (HITS,), generator=draw)
    given = torch.randn(HITS, WIDTH, generator=draw).bfloat16().to(dtype)
    table = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)
    table(looked_up).backward(given)
    assert table.weight.grad is not None
    return table.weight.grad


@pytest.mark.parametrize("again", [False, True])
def test_many_hits_of_a_row_do_not_round_in_a_narrow_dtype(again: bool) -> None:
    exact = gradient_of(torch.float64, False)
    place = torch.full((ROWS, WIDTH), 2.0 if again else float("nan"))
    add_rows(place, gradient_of(torch.bfloat16, True), 0.5, again)
    torch.testing.assert_close(place.double(), exact * 0.5 + 2.0 * again, rtol=1e-6, atol=1e-4)
    narrow = (gradient_of(torch.bfloat16, False).double() - exact).abs().max()
    assert narrow > 1e-2  # what the gradient of the whole table has lost


def test_one_lookup_in_fp32_has_the_bits_of_the_whole_gradient() -> None:
    place = torch.empty(ROWS, WIDTH)
    add_rows(place, gradient_of(torch.float32, True), 1.0, False)
    assert torch.equal(place, gradient_of(torch.float32, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 3, 4, 6, 8])
def test_rows_with_any_bit_are_found(dtype: torch.dtype, width: int) -> None:
    table = torch.zeros(8, width, dtype=dtype)
    table[1, -1], table[2, 0], table[4, 0] = 1.0, float("nan"), float("-inf")
    table[5, 0], table[5, -1], table[7, width // 2] = -1.0, 1.0, torch.finfo(dtype).smallest_normal / 2
    assert nonzero_rows(table).tolist() == [1, 2, 4, 5, 7]
    assert nonzero_rows(table[:1]).tolist() == nonzero_rows(table[:0]).tolist() == []


@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_rows_are_written_to_a_part_of_a_table(width: int, count: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, count * width - 1))
    high = data.draw(st.integers(low + 1, count * width))
    first = low // width
    numbers = sorted(data.draw(st.sets(st.integers(first, (high - 1) // width))))
    add = data.draw(st.booleans())
    before, rows = torch.randn(count, width), torch.randn(len(numbers), width)
    after = before.clone()
    after[numbers] = rows + before[numbers] if add else rows
    part = before.flatten()[low:high].clone()
    relative = torch.tensor(numbers, dtype=torch.int64) - first
    write_rows((relative, rows.clone()), part, low - first * width, add)
    assert torch.equal(part, after.flatten()[low:high])


def test_sums_of_rows_have_the_bits_of_dense_sums_in_rank_order() -> None:
    tables = []
    for rank in range(3):
        draw = torch.Generator().manual_seed(rank)
        table = torch.zeros(ROWS, WIDTH)
        hit = torch.randperm(ROWS, generator=draw)[:50]
        table[hit] = torch.randn(50, WIDTH, generator=draw) * 10.0 ** (4 * rank)
        tables.append(table)
    dense = (tables[0] + tables[1] + tables[2]) * 0.3
    found = [nonzero_rows(table) for table in tables]
    numbers, total = sum_rows([(rows, table[rows]) for rows, table in zip(found, tables, strict=True)], 0.3)
    assert torch.equal(torch.zeros(ROWS, WIDTH).index_copy(0, numbers, total), dense)


def test_tables_of_which_rows_are_sent() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bag = nn.Embedding(600, 8), nn.EmbeddingBag(600, 8)
            self.small, self.tied, self.frozen = nn.Embedding(10, 8), nn.Embedding(600, 8), nn.Embedding(600, 8)
            self.again, self.head = nn.Embedding(600, 8), nn.Linear(8, 600)
            self.again.weight, self.head.weight = self.words.weight, self.tied.weight
            self.frozen.weight.requires_grad_(False)

    model = Model()
    assert find_tables(model, set(model.parameters())) == {model.words.weight, model.bag.weight}
    bag: nn.Parameter = model.bag.weight  # pyright: ignore[reportAssignmentType]
    assert find_tables(model, {bag}) == {bag}
