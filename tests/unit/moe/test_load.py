"""Figures of the load of experts."""

from __future__ import annotations

import pytest

from deepspeed.moe.load import LayerLoad


@pytest.mark.parametrize(
    ("counts", "entropy"), [((5,), 1.0), ((0,), 1.0), ((4, 0), 0.0), ((3, 3), 1.0), ((0, 0), 1.0), ((1, 1, 2, 0), 0.75)]
)
def test_the_entropy_is_between_one_expert_and_all(counts: tuple[int, ...], entropy: float) -> None:
    assert LayerLoad(counts, 0).entropy == pytest.approx(entropy)
