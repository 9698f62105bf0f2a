"""The sum of squares in plain torch and on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from deepspeed.native import INSTRUCTION_SETS, library
from deepspeed.optim import grad_norm
from deepspeed.optim.grad_norm import sum_of_squares
from tests.harness.kernels import forms

TORCH = "torch"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[TORCH, *forms()])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    found = library()
    if found is None or request.param == TORCH:
        monkeypatch.setattr(grad_norm, "library", lambda: None)
    else:
        found.ds_instruction_set(INSTRUCTION_SETS.index(request.param))
    yield request.param
    if found is not None:
        found.ds_instruction_set(len(INSTRUCTION_SETS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_length_and_alignment(dtype: torch.dtype, way: str) -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    for start, stop in ((0, 0), (1, 2), (3, 34), (1, 128), (0, 65_536), (1, 65_538), (5, 200_000)):
        wanted = values[start:stop].double().square().sum()
        assert abs(sum_of_squares(values[start:stop], True) - wanted) <= 1e-12 * wanted
        assert abs(sum_of_squares(values[start:stop], False) - wanted) <= 1e-5 * wanted


def test_large_gradients_are_no_overflow(way: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.full((300,), 1e30).to(dtype)
        for exact in (True, False):
            assert sum_of_squares(values, exact).sqrt() == pytest.approx(values[0].item() * math.sqrt(300), rel=1e-9)


@pytest.mark.drawn(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_anywhere_is_seen(bad: float, dtype: torch.dtype, way: str) -> None:
    for numel, place in ((1, 0), (31, 30), (70_000, 0), (70_000, 65_536), (70_000, 69_999)):
        values = torch.ones(numel, dtype=dtype)
        values[place] = bad
        assert not any(sum_of_squares(values, exact).isfinite() for exact in (True, False))


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(500_001, generator=torch.Generator().manual_seed(0))
    found = set()
    for count in (1, 2, 3, 7):
        monkeypatch.setattr(grad_norm, "threads", lambda count=count: count)
        found.add(sum_of_squares(values, True).item())
    assert len(found) == 1
