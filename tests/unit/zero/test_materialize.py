"""A model made on the meta device gets the values that its modules say; its parameters stay the objects they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.mesh import REPLICATED, mesh_for
from deepspeed.errors import UsageError
from deepspeed.zero.gathered import GatheredParameters
from deepspeed.zero.materialize import is_without_values, materialize
from deepspeed.zero.resettle import is_born, resettle


class Net(nn.Module):
    """What torch's modules have: parameters, statistics, an attention with a reset of another name, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.lstm = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 10)
        self.head.weight = self.table.weight


def reset(module: nn.Module) -> None:
    made = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if made is not None:
        made()


def give(model: nn.Module) -> None:
    materialize(model, mesh_for({}).axis(*REPLICATED, "pp"), torch.device("cpu"))


def test_values_are_those_of_the_model_made_whole() -> None:
    with torch.device("meta"):
        model, dense = Net(), Net()
    dense.to_empty(device="cpu")
    dense.head.weight = dense.table.weight
    torch.manual_seed(0)
    dense.apply(reset)
    before, model.norm.weight.mark = dict(model.named_parameters()), "mine"  # type: ignore[attr-defined]
    assert is_without_values(model)
    torch.manual_seed(0)
    give(model)
    assert not is_without_values(model) and is_born(model)
    after = dict(model.named_parameters())
    same = [name for name, param in before.items() if after[name] is param]  # an optimizer made before knows them
    assert same == [name for name in before if not name.startswith("lstm")]
    assert model.norm.weight.mark == "mine"  # type: ignore[attr-defined]
    with GatheredParameters(list(after.values())):
        for name, param in dense.named_parameters():
            assert torch.equal(after[name], param), name
    for name, buffer in dense.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_what_leaves_is_empty_and_what_stays_is_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    give(model)
    kept, gone = model[0], model[1]
    resettle(dict(model.named_parameters()), kept.parameters(), None)
    assert type(kept.weight) is nn.Parameter and kept.weight.shape == (4, 4) and torch.isfinite(kept.weight).all()
    assert type(gone.weight) is nn.Parameter and gone.weight.numel() == 0


class Parent(nn.Module):
    """Writes, in its own rule, what a child does not."""

    def __init__(self, says: bool) -> None:
        super().__init__()
        self.inner: Any = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(3))
        self.inner.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.says = says

    def _init_weights(self, module: nn.Module) -> None:
        if module is self and self.says:
            nn.init.constant_(self.inner.scale, 2.0)
            self.inner.mask.fill_(True)


def test_a_parent_may_say_what_its_child_does_not_and_nobody_may_not() -> None:
    with torch.device("meta"):
        said, unsaid = Parent(True), Parent(False)
    give(said)
    with GatheredParameters(list(said.parameters())):
        assert torch.equal(said.inner.scale, torch.full((3,), 2.0)) and said.inner.mask.all()
    with pytest.raises(UsageError, match=r"2 tensor\(s\) on the meta device.*'inner.scale' of Module"):
        give(unsaid)
