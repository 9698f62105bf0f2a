"""Which parameters travel together."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.zero.layout.stages import KEPT_WHOLE, policy_for
from deepspeed.zero.layout.units import repeated_blocks, set_z3_leaf_modules
from deepspeed.zero.parameters.grouping import GroupingPlan, named_parameters, plan_groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)


def planned(model: nn.Module, stage: int, plan: GroupingPlan | None = None, **kinds) -> list[list[str]]:
    names = named_parameters(model)
    updated = kinds.get("updated", set(names))
    groups = plan_groups(model, names, updated, policy_for(stage), plan or GroupingPlan(), kinds.get("dtypes", {}))
    return [[names[p] for p in params] for _, params in groups]


def test_sharded_units_are_blocks_and_single_modules() -> None:
    model = Model()
    assert repeated_blocks(model) == list(model.blocks)
    groups = planned(model, 3)
    assert len(groups) == 5 and ["embedding.weight"] in groups and ["head.weight"] in groups
    assert groups[1] == ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight", "blocks.0.1.bias"]


def test_whole_parameters_go_into_buckets_in_the_order_of_backward() -> None:
    model = Model()
    names = list(named_parameters(model).values())
    assert planned(model, 1) == [names[::-1]]
    small = planned(model, 2, GroupingPlan(bucket=40))
    assert [name for group in small for name in group] == names[::-1] and len(small) > 3
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert all(len(group) == 1 or sum(sizes[n] for n in group) <= 40 for group in small)


def test_kinds_never_mix() -> None:
    model = Model()
    model.blocks[1].requires_grad_(False)
    low = {p: torch.bfloat16 for p in model.head.parameters()}
    for stage in (1, 3):
        for group in planned(model, stage, dtypes=low):
            params = [model.get_parameter(name) for name in group]
            assert len({(p.requires_grad, low.get(p, p.dtype)) for p in params}) == 1
    updated = set(model.head.parameters())
    assert planned(model, 2, updated=updated) == [["head.weight"]]
    assert sum(map(len, planned(model, 3, updated=updated))) == len(list(model.parameters()))


def test_persistent_parameters_and_leaves() -> None:
    model = Model()
    names = named_parameters(model)
    plan = GroupingPlan(persist_below=5, persist_total=8)
    groups = plan_groups(model, names, set(names), policy_for(3), plan, {})
    kept = [names[p] for policy, params in groups if policy == KEPT_WHOLE for p in params]
    assert sorted(kept) == ["blocks.0.0.bias", "blocks.0.1.weight"]
    set_z3_leaf_modules(model, ["blocks"])
    assert repeated_blocks(model) == [model.blocks]
    assert len(planned(model, 3)) == 3


def test_a_table_whose_rows_are_sent_is_a_group() -> None:
    model = Model()
    table = model.embedding.weight
    names = list(named_parameters(model).values())
    plan = GroupingPlan(tables=frozenset({table}))
    assert planned(model, 1, plan) == [["embedding.weight"], names[:0:-1]]


def test_layout_of_a_group() -> None:
    plan = GroupingPlan(whole_tensors=True)
    assert plan.layout_for(policy_for(1), [7, 9], 2).cuts == (0, 7, 16)
    assert plan.layout_for(policy_for(0), [7, 9], 2).cuts == (0, 8, 16)
    assert GroupingPlan().layout_for(policy_for(1), [7, 9], 2).cuts == (0, 8, 16)
