"""Choices of experts in simulations, and what a layer of divided experts keeps for backward, by load."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from deepspeed.comm.process_groups.axis import world_axis
from deepspeed.errors import ArgumentError
from deepspeed.moe.expert_parallel import ExpertLocation, become_parallel
from deepspeed.moe.simulated import draw_choices
from deepspeed.moe.structure import find_experts, tried
from deepspeed.ops.fake_tensors import Valueless
from deepspeed.planner.fake_world import simulated_world
from deepspeed.profiling.live_memory import LiveMemory

pytestmark = pytest.mark.usefixtures("without_group")  # simulations make worlds of their own
TOKENS, WIDTH, INNER = 512, 256, 512


@pytest.mark.parametrize(("experts", "k", "ranks"), [(8, 2, 2), (8, 2, 4), (64, 6, 8), (16, 1, 4), (8, 8, 2)])
@pytest.mark.parametrize("load", [0.0, 0.5, 1.0, 1.7, 4.0])
def test_choices_have_the_load_that_is_asked_for(experts: int, k: int, ranks: int, load: float) -> None:
    each, tokens = experts // ranks, 4000
    drawn = draw_choices(tokens, k, tuple(number < each for number in range(experts)), load / ranks)
    assert drawn.shape == (tokens, k)
    assert (np.diff(np.sort(drawn, 1)) > 0).all()  # different experts
    counts = np.bincount(drawn.reshape(-1), minlength=experts)
    assert len(counts) == experts
    least, most = max(0, k - (experts - each)) / k, min(k, each) / k
    share = min(max(load / ranks, least), most)
    assert counts[:each].sum() == pytest.approx(share * tokens * k, abs=0.005 * tokens * k)
    assert counts[:each].max() - counts[:each].min() <= 1


def test_balanced_tokens_go_to_as_many_ranks_as_random_ones() -> None:
    drawn = draw_choices(20000, 2, tuple(number < 4 for number in range(8)), 0.5)
    ranks = np.mean([len(set(row // 4)) for row in drawn])
    assert ranks == pytest.approx(2 - 3 / 7, abs=0.01)


def test_full_experts_drop_choices() -> None:
    drawn = draw_choices(100, 2, (True, False, False, False), 1.0, slots=30)
    assert np.bincount(drawn[drawn >= 0]).max() == 30


def test_a_negative_load_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expert_load is -1"), simulated_world(0, 2, -1):
        pass


def kept(load: float, ranks: int, k: int) -> tuple[int, int]:
    """Bytes that a layer keeps for backward, and its peak in forward."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": 8, "num_experts_per_tok": k}
    config = transformers.MixtralConfig(**sizes)
    config._experts_implementation = "grouped_mm"
    with simulated_world(0, ranks, load), LiveMemory() as live, Valueless():
        module = MixtralExperts(copy.deepcopy(config))
        structure, why = tried(module, next(find_experts(module))[2], ranks)
        assert not why
        become_parallel(module, ExpertLocation(world_axis("ep"), "experts", 8, list(range(ranks))), structure)
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
        weights = torch.rand(TOKENS, k, requires_grad=True)
        index = torch.zeros(TOKENS, k, dtype=torch.long)
        before = live.total
        live.restart_peak()
        out = module(hidden, index, weights)
        return live.total - before - out.nbytes, live.peak - before


@pytest.mark.parametrize("load", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 2])
def test_a_layer_keeps_what_the_formula_says(load: int, k: int) -> None:
    ranks = 4
    found, peak = kept(load, ranks, k)
    drawn = draw_choices(TOKENS, k, tuple(number < 8 // ranks for number in range(8)), load / ranks)
    rows = ranks * int((drawn < 8 // ranks).any(1).sum())  # all ranks choose alike
    pairs, busiest = load * TOKENS * k, ranks * np.bincount(drawn.reshape(-1))[: 8 // ranks].max()
    sent = sum(int((drawn // (8 // ranks) == rank).any(1).sum()) for rank in range(ranks))
    formula = 4 * (rows * WIDTH + pairs * 2 * INNER)
    besides = 4 * (rows * WIDTH + max((sent + TOKENS) * WIDTH, busiest * (INNER + 2 * WIDTH)))
    print(f"{found / formula - 1:+.2%} of {formula}; peak {peak / (formula + besides) - 1:+.2%}")
    assert found == pytest.approx(formula, rel=0.05)
    assert 0.9 * (formula + besides) <= peak <= 1.05 * (formula + besides)
