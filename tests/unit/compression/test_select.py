"""Masks of one bit, exact thresholds and sums that do not depend on how elements are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.compression.fake_quantize import _WeightGroup
from deepspeed.compression.pruning import distributed_topk
from deepspeed.compression.pruning.distributed_topk import exact_sums, keep_largest, kept_of, largest_units, ordered
from deepspeed.compression.pruning.importance import Scores
from deepspeed.compression.pruning.masks import apply_mask, count_dropped, pack_flags, unpack_flags
from deepspeed.compression.pruning.rules import CompressionRule
from deepspeed.compression.pruning.sharded_view import Exchange, Owned
from deepspeed.compression.utils import asymmetric, binary, quantize, straight_through, symmetric, ternary
from deepspeed.errors import CompressionError

ALONE = Axis("alone", (0,), 0, None, True)


def exchange() -> Exchange:
    return Exchange(ALONE, torch.device("cpu"))


@pytest.mark.parametrize("numel", [1, 7, 8, 1001, 140_000])
def test_bits_are_the_flags(numel: int) -> None:
    keep = torch.rand(numel) > 0.4
    packed = pack_flags(keep)
    assert packed.numel() == -(-numel // 8)
    assert torch.equal(unpack_flags(packed, numel), keep)
    values = torch.randn(numel)
    expected = values * keep
    apply_mask(packed, values)
    assert torch.equal(values, expected)
    assert count_dropped(packed) == int((~keep).sum())


@pytest.mark.drawn(6)
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("levels", [3, 10**6])
@pytest.mark.parametrize("chunk", [7, 1 << 18])
def test_the_threshold_is_exact_with_ties_by_index(
    ratio: float, levels: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(distributed_topk, "_CHUNK", chunk)
    params = [nn.Parameter((torch.randn(13, n) * levels).round() / levels) for n in (3, 8, 5)]
    owned = [Owned(str(at), p, ALONE, None) for at, p in enumerate(params)]
    flat = torch.cat([p.detach().abs().view(-1) for p in params])
    keep = kept_of(flat.numel(), ratio)
    found = dict(keep_largest([owned], [keep], lambda one: one.param.detach().abs().view(-1), exchange()))
    assert torch.equal(torch.cat([found[str(at)] for at in range(3)]), largest_units(flat, keep))


def test_the_order_of_numbers() -> None:
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1e-40, 1.0, torch.inf])
    numbers = ordered(values)
    assert torch.equal(numbers, numbers.sort().values) and numbers[2] == numbers[3]
    assert ordered(torch.tensor([torch.nan]))[0] == numbers[0]


def test_sums_do_not_depend_on_the_order() -> None:
    torch.manual_seed(0)
    values = torch.randn(10_000, dtype=torch.float64) * torch.logspace(-20, 20, 10_000, dtype=torch.float64)
    unit = torch.randint(-1, 4, (10_000,))
    order = torch.randperm(10_000)
    one = exact_sums([(values, unit)], 4, 10_000, exchange())
    two = exact_sums(
        [(values[order[:99]], unit[order[:99]]), (values[order[99:]], unit[order[99:]])], 4, 10_000, exchange()
    )
    assert torch.equal(one, two)
    expected = torch.zeros(4, dtype=torch.float64).index_add_(0, unit[unit >= 0], values[unit >= 0])
    assert torch.allclose(one, expected, rtol=1e-9)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_sum_is_finite_where_a_value_is_not(wrong: float, place: int) -> None:
    parts = [(torch.ones(4, dtype=torch.float64), torch.arange(4)) for _ in range(3)]
    parts[place][0][2] = wrong
    assert not exact_sums(parts, 4, 3, exchange()).isfinite().any()


@pytest.mark.parametrize("ratio", [0.3, 0.25, 0.1, 0.001, 0.07, 1.0, 1.5, 1 / 3, 1 / 49, 0.02])
@pytest.mark.parametrize("bits", [(8, 8), (10, 8)])
def test_a_schedule_ends_with_the_last_change(ratio: float, bits: tuple[int, int]) -> None:
    group = _WeightGroup("all", [], bits, 5, 3, ratio, False)
    steps = [group.at(step) for step in range(group.last + 3)]
    assert steps[group.last] == (bits[1], 0.0) and steps[group.last - 1] != steps[group.last]


def test_kept_is_rounded_up_and_not_by_noise() -> None:
    assert [kept_of(30, 0.1), kept_of(10, 0.25), kept_of(10, 1.0)] == [3, 3, 10]


def test_the_arithmetic_of_fake_quantization() -> None:
    x = torch.tensor([-1.0, -0.26, 0.0, 0.24, 0.5, 1.0])
    assert symmetric(x, 3).tolist() == pytest.approx([-1.0, -0.25, 0.0, 0.25, 0.5, 0.75])
    assert asymmetric(x, 3).tolist() == pytest.approx([-1.0, -0.25, 0.0, 0.25, 0.5, 0.75])
    assert binary(x).abs().unique().tolist() == pytest.approx([x.abs().mean().item()])
    above = x.abs() > 0.7 * x.abs().mean()
    assert ternary(x).tolist() == pytest.approx((x.sign() * above * x.abs()[above].mean()).tolist())
    rows = torch.stack([x, 10 * x])
    assert torch.allclose(quantize(rows, 8, "symmetric", groups=2)[1], 10 * quantize(x, 8, "symmetric"))
    weight = x.clone().requires_grad_()
    straight_through(weight, symmetric(weight.detach(), 3)).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(6))


def test_a_criterion_that_no_score_knows_is_refused() -> None:
    rule = CompressionRule("sparse_pruning.x", "sparse_pruning", 0.5, 0, None, 1, False, "magnitude", False)
    owned = Owned("w", nn.Parameter(torch.tensor([1.0, -2.0])), ALONE, None)
    scores = Scores([rule], {"w": owned}, {"w": "w"}, exchange())
    assert scores.of_weights(rule)(owned).tolist() == [1.0, 2.0]
    rule.criterion = "magnitudes"
    with pytest.raises(CompressionError, match=r"sparse_pruning\.x: .*'magnitudes'"):
        scores.of_weights(rule)(owned)
    with pytest.raises(CompressionError, match=r"sparse_pruning\.x: .*'magnitudes'"):
        scores.of_units(rule)
