"""What blocks cost, by operations and by time, and how they are dealt to stages."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from deepspeed.foundation.equivalence import example_inputs
from deepspeed.pipe.partition_cost import costs_of_parts, deal, operations, seconds
from deepspeed.pipe.schedule import make_schedule
from deepspeed.pipe.schedule_simulator import simulate
from deepspeed.pipe.split_model import find_layout

WIDTH = 8


class Slow(nn.Module):
    """A linear map that takes its time, forward or backward."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.linear, self.pauses = nn.Linear(WIDTH, WIDTH), (forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pauses[0])
        made = self.linear(x)
        if made.requires_grad:
            made.register_hook(lambda _: time.sleep(self.pauses[1]))
        return made * 1


class Model(nn.Module):
    """Blocks between two linear maps."""

    def __init__(self, blocks: list[nn.Module], head: int = WIDTH) -> None:
        super().__init__()
        self.below, self.blocks, self.above = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, head)
        self.example_input_array = torch.randn(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.below(x)
        for block in self.blocks:
            x = block(x)
        return self.above(x)


def test_operations_are_those_of_the_matrices() -> None:
    model = Model([nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))], head=20)
    model.train()
    found = operations(model, list(model.blocks), example_inputs(model))
    assert found == [2 * 2 * WIDTH * n for n in (WIDTH, WIDTH, 2 * 3, 20)]
    assert model.training


@pytest.mark.parametrize("frozen", ["nothing", "below", "below and the first block"])
def test_time_is_charged_to_the_block_that_takes_it(frozen: str) -> None:
    model = Model([Slow(), Slow(forward=0.04), Slow(), Slow(backward=0.06)])
    for module in {"nothing": [], "below": [model.below]}.get(frozen, [model.below, model.blocks[0]]):
        module.requires_grad_(False)
    model.above.weight.grad = kept = torch.ones(WIDTH, WIDTH)
    states = torch.get_rng_state()
    found = seconds(model, list(model.blocks), example_inputs(model), repeats=2)
    assert len(found) == 6
    assert found[2] >= 0.04 and found[4] >= 0.06 and sorted(found)[-2:] == sorted([found[2], found[4]]), found
    assert model.above.weight.grad is kept and bool((kept == 1).all()) and model.below.weight.grad is None
    assert torch.equal(torch.get_rng_state(), states)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


def test_a_frozen_model_is_timed_forward() -> None:
    model = Model([Slow(forward=0.03), Slow(backward=0.03)]).requires_grad_(False)
    found = seconds(model, list(model.blocks), example_inputs(model), repeats=1)
    assert found[1] >= 0.03 and max(found) == found[1], found


def test_blocks_that_torch_fuses_are_counted() -> None:
    """In evaluation an encoder layer is one operator, unless it is asked not to be."""
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=wide, batch_first=True) for wide in (16, 16, 64)]
    blocks = [nn.Sequential(layer) for layer in layers]  # a hook on the layer itself would be asking
    model, before = Model(list(blocks)), torch.backends.mha.get_fastpath_enabled()
    model.example_input_array = torch.randn(2, 3, WIDTH)
    found = operations(model, blocks, example_inputs(model))
    assert found[1] == found[2] > 0 and found[3] - found[1] == 2 * 6 * 2 * WIDTH * (64 - 16)
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_a_heavy_head_moves_the_cut() -> None:
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = Model(blocks, head=3 * WIDTH)
    inputs = example_inputs(model)
    assert find_layout(model, 2, inputs, "parameters").bounds == [0, 3, 6]
    layout = find_layout(model, 2, inputs, "best")
    assert layout.bounds == [0, 4, 6] and layout.costs == [
        1.0,
        1.0,
    ]  # below and four blocks; two and three blocks' worth
    told = find_layout(model, 2, inputs, "profile", meter=lambda *_: [0.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert told.bounds == [0, 1, 6]
    assert find_layout(model, 2, inputs, "uniform").costs == pytest.approx([8 / 10, 12 / 10])


def test_what_nothing_is_known_of_is_dealt_by_parameters() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.example_input_array = nn.ModuleList(Gain() for _ in range(4)), torch.ones(1, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    layout = find_layout(model := Bare(), 2, example_inputs(model))
    assert layout.bounds == [0, 2, 4] and layout.costs == [1.0, 1.0]


def by_force(costs: list[float], stages: int, chunks: int) -> float:
    """The time of the slowest stage under the best of all cuts."""
    blocks, parts = len(costs) - 2, stages * chunks
    cuts = itertools.combinations(range(1, blocks), parts - 1)
    return min(slowest(costs, [0, *cut, blocks], stages) for cut in cuts)


def slowest(costs: list[float], bounds: list[int], stages: int) -> float:
    own = costs_of_parts(costs, bounds)
    return max(sum(own[stage::stages]) for stage in range(stages))


@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", range(60))
def test_deals_are_as_good_as_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    stages, chunks = rng.choice([(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
    blocks = rng.randint(stages * chunks, 11)
    costs = [rng.uniform(0, 2), *([1.0] * blocks), rng.uniform(0, 3)]
    bounds = deal(costs, stages, chunks)
    assert bounds[0] == 0 and bounds[-1] == blocks and all(a < b for a, b in itertools.pairwise(bounds))
    assert slowest(costs, bounds, stages) <= by_force(costs, stages, chunks) + 1e-6


def test_a_deal_of_many_blocks_ends_soon() -> None:
    begun = time.process_time()
    deal([1.0, *([1.0] * 1000), 5.0], 16, 8)
    assert time.process_time() - begun < 60


def test_costs_count_in_simulation() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    assert simulate(schedule, [1.0, 1.0]) == simulate(schedule)
    heavy = simulate(schedule, [0.5, 1.5])
    assert heavy.time == pytest.approx(0.5 * 1 + 1.5 * 3 * 4 + 0.5 * 2)  # the last stage never waits in between
    assert heavy.idle == pytest.approx(1 - (0.5 + 1.5) * 3 * 4 / (2 * heavy.time))


def test_measured_costs_and_what_is_beside_the_schedule_count_in_simulation() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    assert simulate(schedule, [(1.0, 2.0), (0.5, 1.0)]) == simulate(schedule, [1.0, 0.5])
    forward, backward, updates = (0.5, 2.0), (1.0, 3.0), (0.25, 0.75)
    found = simulate(schedule, list(zip(forward, backward, strict=True)), updates)
    assert found.time == pytest.approx(0.5 + 4 * (2.0 + 3.0) + 1.0 + 0.75)  # the last stage never waits in between
    assert found.idle == pytest.approx(1 - (4 * sum(forward + backward) + sum(updates)) / (2 * found.time))


def test_counting_loads_no_compiler() -> None:
    code = (
        "import sys, torch; from torch import nn; from deepspeed.pipe.partition_cost import operations; "
        "model = nn.Sequential(nn.Linear(2, 2)); operations(model, list(model), {'input': torch.ones(1, 2)}); "
        "print('torch._dynamo' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False"], told
