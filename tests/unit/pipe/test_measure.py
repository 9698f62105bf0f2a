"""Layers of a row are measured one by one, and dealt by time and memory."""

from __future__ import annotations

import gc
import random
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec, split_model
from deepspeed.pipe.partition_cost import LayerCost, deal_layers, measure

WIDTH = 16


def project(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.t()


class Slow(nn.Linear):
    """Takes its time in forward."""

    def __init__(self, pause: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.pause = pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        return super().forward(x)


@pytest.mark.parametrize(("own", "recomputed"), [(False, 3), (True, 1)])
def test_tied_and_frozen_layers_are_recomputed_as_all_with_parameters(
    monkeypatch: pytest.MonkeyPatch, own: bool, recomputed: int
) -> None:
    """A function of the client's may be reentrant, which would cut off a tied embedding that gets token ids."""
    outputs: list[torch.Tensor] = []

    def recompute(run: Any, inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        outputs.append(run(inputs))
        return outputs[-1]

    monkeypatch.setattr("deepspeed.pipe.module.checkpoint", recompute)
    layers = [
        TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH),
        torch.tanh,
        nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH, forward_fn=project),
    ]
    how: dict[str, Any] = {
        "activation_checkpoint_interval": 1,
        "activation_checkpoint_func": recompute if own else None,
    }
    result = PipelineModule(layers, num_stages=1, **how)(torch.ones(2, WIDTH))
    assert len(outputs) == recomputed and (outputs[-1] is result) is not own


def test_layers_cost_their_time_and_what_they_hold() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    trained, slow = nn.Linear(WIDTH, WIDTH), Slow(0.02)
    costs = measure([(torch.tanh, None), (trained, trained), (frozen, frozen), (slow, slow)], torch.randn(4, WIDTH))
    elements = WIDTH * WIDTH + WIDTH
    assert [cost.state for cost in costs] == [0, 16 * elements, 4 * elements, 16 * elements]
    rows = 4 * WIDTH * 4  # bytes of four samples
    assert [cost.activation for cost in costs] == [rows, rows, 0, rows]
    assert costs[3].seconds >= 0.02 > max(cost.seconds for cost in costs[:3])
    assert all(param.grad is None for layer in (trained, frozen, slow) for param in layer.parameters())


def test_a_layer_that_cannot_run_is_named() -> None:
    with pytest.raises(ArgumentError, match="layer 1 cannot take"):
        measure([(torch.tanh, None), (nn.Linear(3, 3), None)], torch.randn(4, WIDTH))


def cost(seconds: float, state: int = 0, activation: int = 0) -> LayerCost:
    return LayerCost(seconds, state, activation)


def test_time_decides_and_memory_between_equals() -> None:
    assert deal_layers([cost(3), cost(1), cost(1), cost(1)], 2, 1) == [0, 1, 4]
    even = [cost(1, 10), cost(0.001, 1000), cost(1, 10)]  # the heavy one costs no time: it goes where less is held
    assert deal_layers([cost(1, 500), *even[1:]], 2, 1) == [0, 1, 3]
    assert deal_layers([*even[:2], cost(1, 500)], 2, 1) == [0, 2, 3]


def test_a_stage_holds_as_many_micro_batches_as_the_schedule_says() -> None:
    costs = [cost(1, 0, 100) for _ in range(4)]
    assert deal_layers(costs, 2, 1, limit=400) == [0, 2, 4]  # two layers of two micro-batches, two of one
    assert deal_layers(costs, 2, 1, limit=300) == [0, 1, 4]
    with pytest.raises(ArgumentError, match="at most 100 bytes"):
        deal_layers(costs, 2, 1, limit=100)


def test_every_part_has_a_layer_and_every_layer_a_part() -> None:
    draw = random.Random(3)
    for _ in range(50):
        stages, chunks = draw.randint(1, 4), draw.randint(1, 3)
        count = draw.randint(stages * chunks, 16)
        costs = [cost(draw.random(), draw.randint(0, 99), draw.randint(0, 99)) for _ in range(count)]
        bounds = deal_layers(costs, stages, chunks)
        assert bounds[0] == 0 and bounds[-1] == count and bounds == sorted(set(bounds))
        assert len(bounds) == stages * chunks + 1


def test_measuring_changes_nothing_of_what_is_built() -> None:
    def build(**more: Any) -> PipelineModule:
        torch.manual_seed(0)
        rows = [
            TiedLayerSpec("table", nn.Embedding, 8, WIDTH),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            nn.Dropout(0.1),
            TiedLayerSpec("table", nn.Embedding, 8, WIDTH, forward_fn=project),
        ]
        return PipelineModule(rows, num_stages=1, **more)

    plain, by_time = build(), build(partition_method="profile", example_input=torch.tensor([[1, 2]]))
    assert by_time.partitions() == [0, 4]
    pairs = zip(plain.parameters(), by_time.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(ArgumentError, match="example_input"):
        build(partition_method="profile")


def test_one_measured_layer_lives_at_a_time() -> None:
    built, others = list[weakref.ref[nn.Module]](), list[int]()

    class Counted(nn.Linear):
        def __init__(self) -> None:
            others.append(sum(one() is not None for one in built))
            super().__init__(WIDTH, WIDTH)
            built.append(weakref.ref(self))

    rows, given = [LayerSpec(Counted) for _ in range(4)], torch.randn(2, WIDTH)
    gc.disable()  # nobody waits for it
    try:
        PipelineModule(rows, num_stages=1, partition_method="profile", example_input=given)
    finally:
        gc.enable()
    assert others[:4] == [0] * 4


def test_metrics_of_a_loss_keep_no_graph() -> None:
    def loss_fn(made: torch.Tensor, wanted: torch.Tensor) -> Any:
        return (made - wanted).square().mean(), {"spread": made.exp().std(), "count": 3}

    model = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH)], num_stages=1, loss_fn=loss_fn)
    part, given = next(model.parts()), torch.randn(2, WIDTH)
    assert part.loss(model(given), (given, given)).requires_grad
    spread = part.metrics["spread"]
    assert isinstance(spread, torch.Tensor) and not spread.requires_grad and part.metrics["count"] == 3


def test_metrics_of_a_model_are_numbers_and_no_small_tensors() -> None:
    assert split_model.View._is_number(torch.tensor(1.0))
    assert not any(map(split_model.View._is_number, (torch.zeros(1, 1), torch.zeros(1), torch.tensor(1), 1.0)))


@pytest.mark.parametrize("interval", [0, 1])
def test_a_recomputed_layer_has_the_seed_of_its_own_micro_batch(interval: int) -> None:
    """As in a schedule of one forward and one backward, where later micro-batches have run before a backward."""
    layers = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))]
    torch.manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    module = PipelineModule(layers, num_stages=1, seed_layers=True, activation_checkpoint_interval=interval)
    inputs = torch.arange(32.0).view(4, 8).requires_grad_()
    first = module(inputs)
    masked = first == 0
    for _ in range(3):
        module(inputs)
    (gradient,) = torch.autograd.grad(first.sum(), [layers[1][0].bias])
    assert torch.equal(gradient, (~masked).sum(0) * 2.0) and masked.any()
