"""Bytes that ranks send for a layer of experts, counted in the package's exchange, beside the formula."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experts_scale import SHAPES, break_even, count, formula, side
from deepspeed.simulator.machine import Machine

RANKS, TOKENS = 8, 32


@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_sends_the_bytes_of_the_formula(name: str) -> None:
    shape, ranks = SHAPES[name], [0, RANKS - 1]
    found, spread = count(shape, RANKS, TOKENS, ranks)
    for rank, (forward, backward, index) in zip(ranks, found, strict=True):
        assert (index.sort(1).values.diff(dim=1) > 0).all()  # different experts
        each = shape.experts // RANKS
        received = 0
        for other in range(RANKS):
            if other != rank:
                received += int((shape.draw(TOKENS, other) // each == rank).any(1).sum())
        assert received == forward.received
        passes = (forward.to_experts, forward.to_tokens, backward.to_experts, backward.to_tokens, forward.counts)
        assert passes == formula(shape, RANKS, index, rank, received)
    assert 0 < spread < min(shape.choices, RANKS - 1) + 1e-9


def test_deepseeks_router_keeps_to_half_of_the_groups() -> None:
    shape = SHAPES["DeepSeek-V3"]
    groups = shape.draw(TOKENS, 0) // (shape.experts // shape.groups)
    assert all(len(set(row)) <= shape.of_groups for row in groups.tolist())


def test_small_micro_batches_are_faster_with_divided_experts_and_large_ones_without() -> None:
    machine, shape = Machine.load("H100-80GB"), SHAPES["Qwen3-30B-A3B"]
    most = break_even(shape, machine, 64, 8, 4.7)
    assert 0 < most < 2**22
    for tokens, faster in ((most // 2, True), (2 * most, False)):
        divided, whole = side(shape, machine, 64, 8, 4.7, tokens), side(shape, machine, 64, 1, 0.0, tokens)
        assert (divided.seconds < whole.seconds) is faster
        assert torch.isfinite(torch.tensor(divided.seconds))
