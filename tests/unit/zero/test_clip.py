"""The norm's parts and the factor that clips."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed.optim.grad_norm import clip_factor, sum_of_squares


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 7, 200_000])
def test_sum_of_squares(numel: int, dtype: torch.dtype) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    wanted = flat.double().square().sum()
    for exact, bar in ((True, 1e-12), (False, 1e-5)):
        found = sum_of_squares(flat, exact)
        assert found.dtype == torch.float64 and found.dim() == 0
        assert abs(found - wanted) <= bar * max(1.0, wanted)


def test_exact_does_not_depend_on_the_cut() -> None:
    flat = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 1e3
    parts = sum(sum_of_squares(part, True) for part in flat.split(77_777))
    assert abs(parts - sum_of_squares(flat, True)) <= 1e-9 * parts


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_not_finite_stays_so(bad: float, exact: bool) -> None:
    assert not math.isfinite(sum_of_squares(torch.tensor([1.0, bad]), exact))


def test_factor() -> None:
    assert clip_factor(5.0, 0.0) == clip_factor(0.5, 1.0) == clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(math.nan, 1.0) == clip_factor(math.inf, 1.0) == 1.0
    for norm in (0.0, 0.3, 1.0, 7.1, 1e30, math.inf, math.nan):  # with the same bits on a device
        assert float(clip_factor(torch.tensor(norm, dtype=torch.float64), 0.7)) == clip_factor(norm, 0.7)
    gradient = torch.nn.Parameter(torch.zeros(3))
    gradient.grad = torch.tensor([3.0, 4.0, 12.0])
    torch.nn.utils.clip_grad_norm_([gradient], 2.0)
    assert torch.allclose(torch.tensor([3.0, 4.0, 12.0]) * clip_factor(13.0, 2.0), gradient.grad, rtol=1e-7)
