"""Gradients of tables by rows, added to where they are summed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
