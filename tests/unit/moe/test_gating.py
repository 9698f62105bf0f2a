"""Routing with capacity against plain loops, and the parts of the layer that need no ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import ArgumentError, NotAvailableError, UsageError
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from tests.unit.moe.by_hand import expert_of, route, through

TOKENS, EXPERTS, WIDTH = 24, 4, 6


def scores(seed: int = 0, experts: int = EXPERTS) -> torch.Tensor:
    """Uneven ones: capacity drops some."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, experts, generator=generator, dtype=torch.float64) + torch.arange(experts) * 0.4


def gumbel(like: torch.Tensor) -> torch.Tensor:
    return -torch.empty_like(like).exponential_().log()


CELLS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {"use_rts": False}, {}),
    (1, {"use_rts": True}, {"random": True}),
    (1, {"drop_tokens": False}, {"drop": False}),
    (1, {"use_rts": False, "used_token": torch.arange(TOKENS) % 3 != 1}, {"used": torch.arange(TOKENS) % 3 != 1}),
    (1, {"use_rts": False, "noisy_gate_policy": "RSample"}, {"noise": True}),
    (2, {"top2_2nd_expert_sampling": False}, {}),
    (2, {"top2_2nd_expert_sampling": True}, {"noise": True}),
    (2, {"top2_2nd_expert_sampling": False, "drop_tokens": False}, {"drop": False}),
    (3, {}, {}),
    (3, {"drop_policy": "position"}, {"policy": "position"}),
    (3, {"drop_tokens": False}, {"drop": False}),
]


@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize(("k", "ours", "theirs"), CELLS)
def test_routing_is_that_of_the_loops(k: int, ours: dict[str, Any], theirs: dict[str, Any], factor: float) -> None:
    logits = scores().requires_grad_()
    other = scores().requires_grad_()
    call: Any = {1: top1gating, 2: top2gating, 3: lambda x, *a, **kw: topkgating(x, 3, *a, **kw)}[k]
    torch.manual_seed(3)
    drawn = dict(theirs)
    if "noise" in theirs:
        drawn["noise"] = gumbel(other.detach())
    if "random" in theirs:
        drawn["random"] = 1 - torch.rand(other.shape)
    loss, combine, counts = route(other, k, factor, 2, **drawn)
    torch.manual_seed(3)
    found, weights, taken, counted = call(logits, factor, 2, **ours)
    assert weights.shape == combine.shape and torch.equal(counted, counts)
    assert torch.equal(taken, combine != 0) and (
        not theirs.get("drop", True) or factor > 0.5 or taken.sum() < counts.sum()
    )
    torch.testing.assert_close(weights, combine, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(combine.shape, generator=generator, dtype=combine.dtype)
    (found + (weights * direction).sum()).backward()
    (loss + (combine * direction).sum()).backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-11, atol=1e-14)
    torch.manual_seed(3)
    sparse = call(scores(), factor, 2, **ours, sparse_routes=True)
    _, capacity, experts, index, slots, gates, _ = sparse
    assert (capacity, experts, index.dtype) == (combine.shape[2], EXPERTS, torch.int32)
    again = torch.zeros_like(combine)
    for choice in range(k):
        kept = (index[choice] >= 0).nonzero().view(-1)
        again[kept, index[choice][kept].long(), slots[choice][kept]] = gates[choice][kept]
    assert torch.equal(again, weights)


def test_bad_arguments_are_said() -> None:
    with pytest.raises(AssertionError, match="min_capacity 8"):
        top1gating(scores()[:5], 1.0, 8)
    with pytest.raises(ArgumentError, match="'last'"):
        topkgating(scores(), 3, 1.0, 4, drop_policy="last")
    with pytest.raises(AssertionError, match=r"sizes that do: \[1, 2, 3, 6\]"):
        MoE(4, nn.Linear(4, 4), num_experts=6, ep_size=4)
    with pytest.raises(ArgumentError, match="k = 3 of 2"):
        MoE(4, nn.Linear(4, 4), num_experts=2, k=3)
    with pytest.raises(ArgumentError, match="'Loud'"):
        TopKGate(4, 2, noisy_gate_policy="Loud")
    layer = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2)
    with pytest.raises(UsageError, match="divided among 2 ranks"):
        layer(torch.zeros(8, 4))
    with pytest.raises(NotAvailableError, match="use_data_before_expert_parallel"):
        layer.set_deepspeed_parallelism(True)
    with pytest.raises(AssertionError, match="ep 2 does not divide"):
        layer.set_deepspeed_parallelism()


def test_the_router_is_wide() -> None:
    gate = TopKGate(WIDTH, EXPERTS, k=2, min_capacity=2, top2_2nd_expert_sampling=False).to(torch.bfloat16)
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        _, weights, *_ = gate(x)
    logits = x.float() @ gate.wg.weight.float().t()
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, route(logits, 2, 1.0, 2)[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("residual", [False, True])
def test_names_marks_and_the_residual_form(residual: bool) -> None:
    expert = expert_of(WIDTH)
    layer = MoE(WIDTH, expert, num_experts=3, k=1, use_residual=residual, use_rts=False, capacity_factor=0.5).double()
    names = set(layer.state_dict())
    inside = {f"{n}.{w}" for n in (0, 2) for w in ("weight", "bias")}
    wanted = {"deepspeed_moe.gate.wg.weight"}
    wanted |= {f"deepspeed_moe.experts.deepspeed_experts.{e}.{name}" for e in range(3) for name in inside}
    wanted |= {f"mlp.{name}" for name in inside} | {"coefficient.weight", "coefficient.bias"} if residual else set()
    assert names == wanted
    for name, param in layer.named_parameters():
        marked = "deepspeed_experts" in name
        assert is_moe_param(param) == marked and (getattr(param, "group_name", None) == "ep_size_1") == marked
    assert (layer.mlp is expert) if residual else not hasattr(layer, "mlp")
    x = torch.randn(2, TOKENS // 2, WIDTH, dtype=torch.float64)
    out, loss, counts = layer(x)
    flat = x.view(-1, WIDTH)
    logits = flat @ layer.deepspeed_moe.gate.wg.weight.t()
    found, combine, counted = route(logits, 1, 0.5, 4)
    wanted_out = through(layer.deepspeed_moe.experts.deepspeed_experts, combine, flat)
    if residual:
        mix = layer.coefficient(flat).softmax(-1)
        wanted_out = wanted_out * mix[:, :1] + layer.mlp(flat) * mix[:, 1:]
    torch.testing.assert_close(out.view(-1, WIDTH), wanted_out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(loss, found, rtol=1e-12, atol=0)
    assert torch.equal(counts, counted) and torch.equal(counts, layer.deepspeed_moe.exp_counts)
    assert has_moe_layers(nn.Sequential(layer)) == (True, 3)


def test_used_tokens_and_jitter() -> None:
    layer = MoE(WIDTH, expert_of(WIDTH), num_experts=2, k=1, use_rts=False, noisy_gate_policy="Jitter")
    x, used = torch.randn(TOKENS, WIDTH), torch.arange(TOKENS) % 2
    out, _, counts = layer(x, used)
    assert not out[used == 0].any() and int(counts.sum()) == TOKENS // 2
    torch.manual_seed(0)
    trained, *_ = layer(x)
    torch.manual_seed(0)
    jittered = layer.deepspeed_moe.gate.wg(x * torch.empty_like(x).uniform_(0.99, 1.01)).softmax(1).max(1).values
    torch.manual_seed(0)
    assert torch.equal(layer.deepspeed_moe.gate(x)[1].sum((1, 2))[trained.any(1)], jittered[trained.any(1)])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_experts_run_on_blocks_and_lose_what_they_return_beside() -> None:
    class Pair(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return super().forward(input), "beside"

    experts = Experts(Pair(3, 3), 2, "ep_size_1")
    nn.init.normal_(experts.deepspeed_experts[1].weight)
    x = torch.randn(2, 2, 5, 3)
    out = experts(x)
    wanted = [experts.deepspeed_experts[e](x[:, e])[0] for e in range(2)]
    torch.testing.assert_close(out, torch.stack(wanted, 1))
    experts.deepspeed_experts.number_from(4, 8)
    assert list(experts.state_dict()) == [f"deepspeed_experts.{e}.{n}" for e in (4, 5) for n in ("weight", "bias")]
    assert experts.deepspeed_experts[1] is experts.deepspeed_experts[-1] and len(experts.deepspeed_experts[:]) == 2
    whole = {f"deepspeed_experts.{e}.{n}": torch.full((3, 3) if n == "weight" else (3,), float(e))
             for e in range(8) for n in ("weight", "bias")}  # fmt: skip
    experts.load_state_dict(whole)
    assert experts.deepspeed_experts[0].weight[0, 0].item() == 4.0
    with pytest.raises(RuntimeError, match="deepspeed_experts.8.weight"):
        experts.load_state_dict(whole | {"deepspeed_experts.8.weight": torch.zeros(3, 3)})


def test_groups_of_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=3))
    params = list(model.parameters())
    shared, experts = split_params_into_shared_and_expert_params(params)
    assert len(shared) == 3 and len(experts) == 6 and all(map(is_moe_param, experts))
    group = {"params": params, "name": "all", "lr": 0.5}
    groups = split_params_into_different_moe_groups_for_optimizer(group, max_group_size=25)
    assert groups[0] is group and group["params"] == shared and not is_moe_param_group(group)
    assert [len(g["params"]) for g in groups[1:]] == [2, 2, 2]
    assert all((g["name"], g["moe"], g["lr"]) == ("ep_size_1", True, 0.5) for g in groups[1:])
    (dense, moe) = configure_moe_param_groups(list(model.parameters()))
    assert dense["name"] == "dense-params" and is_moe_param_group(moe) and configure_moe_param_groups([moe]) == [moe]
    assert len(split_params_into_different_moe_groups_for_optimizer((dict(params=params, name="x"),))) == 2
    params[0].grad, experts[0].grad = torch.ones(4, 4), torch.zeros(4, 4)
    (first,), (second,) = split_params_grads_into_shared_and_expert_params(params)
    assert first is params[0].grad and second is experts[0].grad
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    assert engine.has_moe_layers and engine.num_experts == [3] and engine.moe_layers == [model[1]]
    before = copy.deepcopy(model[1].deepspeed_moe.experts.deepspeed_experts[0].weight.detach())
    out, loss, _ = engine(torch.randn(8, 4))
    engine.backward(out.square().mean() + loss)
    engine.step()
    assert not torch.equal(before, model[1].deepspeed_moe.experts.deepspeed_experts[0].weight)
    engine.destroy()


def test_one_rank_drops_and_gathers_nothing() -> None:
    x = torch.randn(4, 3)
    assert torch.equal(drop_tokens(x), x) and torch.equal(gather_tokens(x, 1), x)
