"""Channels of six kinds of convolutional networks and rows of eight odd modules: removed is masked, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.compress import section_of
from deepspeed.compression.pruning.distributed_topk import kept_of
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.rules import rules_of
from deepspeed.errors import CompressionError
from tests.unit.compression import networks
from tests.unit.compression.networks import KINDS, lively
from tests.unit.compression.test_calls import config, llama, technique


def named(modules: list[str], related: Any = None, ratio: float = 0.5) -> dict[str, Any]:
    group: dict[str, Any] = {"params": {"dense_ratio": ratio}, "modules": [f"^{name}$" for name in modules]}
    return {"g": group | ({"related_modules": related} if related else {})}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_half_of_the_channels_leave(kind: type[nn.Module]) -> None:
    pytest.importorskip("torch_pruning")
    torch.manual_seed(0)
    model: Any = lively(kind())
    modules, sizes = KINDS[kind]
    section = config(technique("channel_pruning", named(modules), method="l1"))
    masked = copy.deepcopy(model)
    params = dict(masked.named_parameters())
    chosen = []
    for rule in rules_of(masked, section_of(section)[0], PruningPlan(masked)):
        assert rule.removable, rule.families
        for family in rule.families:
            score = torch.zeros(family.size, dtype=torch.float64)
            for slot in (slot for slot in family.slots if slot.scored):
                values = params[slot.name].detach().double().abs().view(-1)
                score.index_add_(0, slot.units(params[slot.name].shape, 0, values.numel()), values)
            chosen.append((family, family.choose(score, kept_of(family.size // family.blocks, 0.5) * family.blocks)))
    for family, keep in chosen:
        for name in family.names():
            flat = params[name].data.view(-1)
            flat.mul_(family.flags(name, params[name].shape, (0, flat.numel()), keep))
    before = sum(p.numel() for p in model.parameters())
    redundancy_clean(init_compression(model, section), section)
    for name, size in sizes.items():
        module = model.get_submodule(name)
        out = next(getattr(module, k) for k in ("out_channels", "num_features", "out_features") if hasattr(module, k))
        assert out == size, (name, out, size)
    after = sum(p.numel() for p in model.parameters())
    x = torch.randn(3, *model.example_input_array.shape[1:])
    with torch.no_grad():
        wanted = masked(x)
        apart = float((model(x) - wanted).abs().max() / wanted.abs().max())
    print(f"{kind.__name__}: {before} parameters are {after}, apart {apart:.1e}")
    assert apart <= 1e-5 and after < before
    assert all(p.grad is None for p in model.parameters())
    model.train()(x).sum().backward()


ODD = {
    "Unused": None,
    "Called": None,
    "Functional": None,
    "Subclassed": None,
    "Lifted": None,
    "Twins": "the smaller model fails",
    "Loose": "the smaller model fails",
    "Normed": "the smaller model fails",
}


@pytest.mark.parametrize("name", ODD)
def test_rows_of_odd_modules_leave_or_are_refused(name: str) -> None:
    torch.manual_seed(0)
    model: Any = getattr(networks, name)().eval()
    x = torch.randn(5, 6)
    section = config(technique("row_pruning", named(["up"], [["^down$"]]), method="l1"))
    masked = copy.deepcopy(model)
    keep = torch.zeros(8).index_fill_(0, model.up.weight.abs().sum(1).topk(4).indices, 1)
    masked.up.weight.data.mul_(keep[:, None])
    masked.up.bias.data.mul_(keep)
    masked.down.weight.data.mul_(keep)
    model.example_input_array = torch.randn(2, 6)
    if ODD[name] is None:
        redundancy_clean(init_compression(model, section), section)
        assert model.up.weight.shape == (4, 6) and model.down.weight.shape == (3, 4)
        assert torch.allclose(model(x), masked(x), rtol=1e-5, atol=1e-6)
        return
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match=ODD[name]):
        init_compression(model, section)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_norm_that_is_named_as_a_partner_is_refused() -> None:
    """Its statistics are over the units: those that are gone do not count, those that are masked do."""
    model: Any = networks.Normed()
    model.example_input_array = torch.randn(2, 6)
    section = config(technique("row_pruning", named(["up"], [["^down$", "^norm$"]]), method="l1"))
    with pytest.raises(CompressionError, match="removed is not masked"):
        init_compression(model, section)


def test_physical_is_not_masks_in_silence() -> None:
    model = networks.Unused()
    for physical in (True, False):
        section = config(technique("row_pruning", named(["up"]), method="l1", physical=physical))
        if not physical:
            init_compression(model, section)
            continue
        with pytest.raises(CompressionError, match="physical is true"):
            init_compression(model, section)


def test_channels_that_leave_the_model_say_so() -> None:
    pytest.importorskip("torch_pruning")
    section = config(technique("channel_pruning", named(["out"]), method="l1", physical=True))
    with pytest.raises(CompressionError, match="out: they leave the model"):
        init_compression(networks.UNet(), section)


@pytest.mark.parametrize("named_by", ["self_attn", "q_proj", "v_proj"])
def test_heads_are_those_of_the_plan_whichever_matrix_is_named(named_by: str) -> None:
    """Not runs of the inputs of q, k and v, which are channels of the residual stream."""
    model = llama(0, 2)
    plan, found = PruningPlan(model), []
    for name in ("o_proj", named_by):
        group = {"g": {"params": {"dense_ratio": 0.5}, "modules": [name]}}
        (rule,) = rules_of(model, section_of(config(technique("head_pruning", group)))[0], plan)
        assert rule.removable
        found.append([(family.label, family.size, family.names()) for family in rule.families])
    assert found[0] == found[1] and len(found[0]) == 2
