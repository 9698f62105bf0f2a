"""Progressive layer drop on single models: kept layers and their scale, draws, and outputs of skipped layers."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.data import layer_drop
from deepspeed.data.layer_drop import LayerDrop, LayerDropSchedule, enable_layer_drop, layer_stacks
from deepspeed.errors import ArgumentError, UsageError
from tests.unit.data.ltd_models import ALL_MODELS, LAYERS, batch, build, layers_of


def test_theta_is_the_formula() -> None:
    schedule = LayerDropSchedule(theta=0.4, gamma=0.01)
    assert schedule.get_theta() == 1.0 and schedule.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step in (0, 1, 70, 10_000):
        schedule.update_state(step)
        assert schedule.get_theta() == pytest.approx(0.6 * math.exp(-0.01 * step) + 0.4, abs=1e-12)
    assert LayerDropSchedule().theta == 0.5 and LayerDropSchedule().gamma == 0.001


@pytest.mark.parametrize("wrong", [{"theta": -0.1}, {"theta": 1.1}, {"gamma": -1}, {"gamma": math.inf}])
def test_wrong_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match="layer drop"):
        LayerDropSchedule(**wrong)


class Steps(nn.Module):
    """Layers that add their number to the input."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Identity(), Adds(2.0**index)) for index in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Adds(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(number, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


def kept_layers(model: nn.Module, drop: LayerDrop, inputs: dict[str, Any]) -> list[bool]:
    """Which layers computed in a forward."""
    ran: list[int] = []
    handles = [
        next(module for module in layer.modules() if not list(module.children())).register_forward_hook(
            lambda *_, number=number: ran.append(number) if torch.is_grad_enabled() else None  # else it is a look
        )
        for number, (layer, _) in enumerate(drop._forwards)
    ]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return [number in ran for number in range(len(drop._forwards))]


def test_probabilities_and_scale_are_those_of_the_paper() -> None:
    model, count, speed = Steps(), 1500, 0.002
    drop = enable_layer_drop(model, theta=0.2, gamma=speed)
    expected, seen = torch.zeros(4), torch.zeros(4)
    outputs: list[torch.Tensor] = []
    model.register_forward_hook(lambda *call: outputs.append(call[-1]))
    for update in range(count):
        drop.update = update
        kept = torch.tensor(kept_layers(model, drop, {"x": torch.zeros(1, 1, 1, dtype=torch.float64)}))
        theta = 0.8 * math.exp(-speed * update) + 0.2
        probabilities = torch.tensor([1 - (index + 1) / 4 * (1 - theta) for index in range(4)])
        change = (2.0 ** torch.arange(4) / probabilities * kept).sum()
        torch.testing.assert_close(outputs.pop().flatten()[0].float(), change)
        seen += kept
        expected += probabilities
    assert ((seen - expected).abs() < 4 * (count / 4) ** 0.5).all() and (expected < count).all(), (seen, expected)


@pytest.mark.parametrize("kind", ALL_MODELS)
def test_all_layers_kept_are_the_model_and_skipped_ones_change_nothing_else(kind: str) -> None:
    attention = {"attention": "eager"} if kind == "bloom" else {}
    model, inputs = build(kind, **attention).train(), batch(2)
    names, plain = list(model.state_dict()), model(**inputs).logits
    drop = enable_layer_drop(model, theta=1.0)
    assert torch.equal(model(**inputs).logits, plain)
    drop.remove()
    drop = enable_layer_drop(model, theta=0.0, gamma=1.0, seed=3)
    drop.update = 1
    twins: dict[tuple[bool, ...], torch.Tensor] = {}
    for _ in range(6):
        kept = kept_layers(model, drop, inputs)
        logits = model(**inputs).logits
        assert logits.isfinite().all()
        logits.sum().backward()
        twins[tuple(kept)] = logits
    assert len(twins) > 2 and not all(all(kept) for kept in twins)
    if kind == "t5":
        assert all(kept[0] and kept[LAYERS] for kept in twins)  # of encoder and decoder, which form the biases
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model).train(), pickle.loads(pickle.dumps(model)).train(), model.eval()):
        assert torch.equal(other(**inputs).logits, plain)
    drop.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_skipped_layer_leaves_random_states_and_gradients_alone() -> None:
    model = build("bert", hidden_dropout_prob=0.5).train()
    drop = enable_layer_drop(model, theta=0.0, gamma=100.0, blocks=layers_of(model)[3:])
    drop.update = 1
    torch.manual_seed(7)
    out = model(**batch(0))
    state = torch.get_rng_state()
    out.loss.backward()
    assert all(p.grad is None for p in layers_of(model)[3].parameters())
    assert all(p.grad is not None for p in layers_of(model)[2].parameters())
    torch.manual_seed(7)
    assert torch.equal(model(**batch(0)).loss, out.loss) and torch.equal(torch.get_rng_state(), state)


def test_draws_depend_on_seed_and_step_alone() -> None:
    def draws(seed: int, updates: list[int]) -> list[bool]:
        model = Steps()
        drop = enable_layer_drop(model, theta=0.3, gamma=10.0, seed=seed)
        kept = []
        for update in updates:
            drop.update = update
            kept += kept_layers(model, drop, {"x": torch.zeros(1, 1, 1, dtype=torch.float64)})
        return kept

    torch.manual_seed(0)
    first = draws(1, [1, 2, 3, 4])
    torch.manual_seed(1)
    assert draws(1, [1, 2, 3, 4]) == first and draws(1, [3, 4]) == first[8:]
    assert draws(2, [1, 2, 3, 4]) != first


def test_models_without_such_layers_are_refused() -> None:
    for module in (nn.Linear(2, 2), nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))):
        with pytest.raises(ArgumentError, match="no ModuleList of layers"):
            layer_stacks(module)
    model = Steps()
    enable_layer_drop(model, theta=0.0)
    with pytest.raises(UsageError, match="layer 0 gets a int in the first place"):
        model(3)
    assert layer_drop.SEED == 1234


# -- what a critic found -----------------------------------------------------------------------------------------------


class Step(torch.nn.Module):
    def __init__(self, width: int = 8, out: int = 8) -> None:
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(width, out), 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return self.inner(args[0])


def test_generation_in_training_mode_runs_whole_layers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    drop = enable_layer_drop(model, theta=0.0, gamma=100.0)
    drop.update = 50
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), plain)


def test_a_layer_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ArgumentError, match="occurs several times"):
        enable_layer_drop(torch.nn.Module(), blocks=[Step()] * 3)


def test_layers_are_skipped_once() -> None:
    blocks = [Step(), Step()]
    drop = enable_layer_drop(torch.nn.Module(), blocks=blocks)
    with pytest.raises(UsageError, match="skipped already"):
        enable_layer_drop(torch.nn.Module(), blocks=blocks)
    drop.remove()
    enable_layer_drop(torch.nn.Module(), blocks=blocks).remove()


def test_a_wrapper_around_a_removed_replacement_runs_the_layer() -> None:
    block = Step()
    drop = enable_layer_drop(torch.nn.Module(), theta=0.0, gamma=100.0, blocks=[block, Step()])
    drop.update = 50
    own = block.forward
    block.forward = lambda x: own(x)
    drop.remove()
    for _ in range(20):
        block(torch.ones(1, 8))
    assert block.calls == 20


def test_a_layer_of_another_width_is_refused_by_name() -> None:
    blocks = [Step(8, 3), Step(8, 3)]
    enable_layer_drop(torch.nn.Module(), theta=0.5, blocks=blocks)
    with pytest.raises(UsageError, match=r"returns \[1, 3\] for \[1, 8\]"):
        blocks[0](torch.ones(1, 8))


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor, attn_bias: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)


def test_an_optional_bias_that_no_layer_returns_does_not_keep_layers() -> None:
    blocks = [Biased(), Biased()]
    drop = enable_layer_drop(torch.nn.Module(), theta=0.0, gamma=100.0, blocks=blocks)
    drop.update = 50
    for _ in range(20):
        blocks[1](torch.ones(1, 8))
    assert blocks[1].calls == 1  # the trial run that shows what it returns
