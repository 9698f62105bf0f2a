"""A model made on the meta device gets the values that its modules say; its parameters stay the objects they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.process_groups.mesh import REPLICATED, mesh_for
from deepspeed.errors import UsageError
from deepspeed.zero.api.gathered_parameters import GatheredParameters
from deepspeed.zero.api.materialize import is_without_values, materialize
from deepspeed.zero.api.reshard import is_sharded_by_init, shard_over


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
    assert not is_without_values(model) and is_sharded_by_init(model)
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
    shard_over(dict(model.named_parameters()), kept.parameters(), None)
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


class Ruled(nn.Module):
    """A rule that writes in one of the ways that clients' models do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(4, 2, padding_idx=0)

    def _init_weights(self, module: nn.Module, name: str = "") -> None:
        assert not name
        if isinstance(module, nn.Embedding):
            if self.way == "row":
                nn.init.constant_(module.weight.data[2], 7.0)
        elif isinstance(module, nn.Linear):
            weight: Any = module.weight.data if self.way == "data" else module.weight
            with torch.no_grad():
                weight.fill_(7.0)
                if self.way == "data":
                    module.bias.data.zero_()


@pytest.mark.parametrize("way", ["data", "weight alone", "row"])
def test_what_a_rule_writes_is_kept_and_the_rest_is_reset(way: str) -> None:
    with torch.device("meta"):
        model = Ruled(way)
    give(model)
    with GatheredParameters(list(model.parameters())):
        assert (model.one.weight == 7.0).all() and (model.two.weight == 7.0).all()
        assert all(param.isfinite().all() for param in model.parameters())
        assert (model.table.weight[0] == 0.0).all() and model.table.weight[1].any(), "those of its reset"
        assert (model.table.weight[2] == 7.0).all() == (way == "row")


class Over(nn.MultiheadAttention):
    """Its reset writes to a child, whose values a rule has given."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 7.0)


def test_a_reset_does_not_write_over_what_a_rule_gave_a_child() -> None:
    with torch.device("meta"):
        model: Any = Over(4, 2)
    give(model)
    with GatheredParameters(list(model.parameters())):
        assert (model.out_proj.bias == 7.0).all() and (model.in_proj_bias == 0.0).all()


@pytest.mark.parametrize("kind", [nn.Linear, nn.MultiheadAttention])
def test_values_that_are_there_stay(kind: Any) -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(kind(8, 8))
    name = "bias" if kind is nn.Linear else "out_proj.bias"
    real = torch.full((8,), 3.0)
    model.load_state_dict({f"0.{name}": real.clone()}, strict=False, assign=True)
    give(model)
    with GatheredParameters(list(model.parameters())):
        assert torch.equal(model[0].get_parameter(name), real)
        assert all(param.isfinite().all() for param in model.parameters())


def test_a_model_that_was_refused_remains_without_values_until_it_has_them() -> None:
    with torch.device("meta"):
        model = Parent(False)
    for _ in range(2):
        with pytest.raises(UsageError, match="'inner.scale' of Module"):
            give(model)
        assert is_without_values(model)
    model.says = True
    give(model)
    assert not is_without_values(model)
    with GatheredParameters(list(model.parameters())):
        assert torch.equal(model.inner.scale, torch.full((3,), 2.0)) and model.inner.mask.all()


class Scaling(nn.Module):
    """A rule that changes what a class has given itself, and draws what it says alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.normal_()
            module.weight.data.mul_(0.5)
            with torch.no_grad():
                module.weight[0] += 1.0


def test_a_rule_may_change_what_a_class_gives_itself() -> None:
    with torch.device("meta"):
        model = Scaling()
    torch.manual_seed(0)
    give(model)
    torch.manual_seed(0)
    with GatheredParameters(list(model.parameters())):
        for linear in (model.one, model.two):
            bias, whole = torch.empty(4).normal_(), nn.Linear(4, 4)
            assert torch.equal(linear.bias, bias), "drawn once"
            weight = whole.weight.detach() * 0.5
            weight[0] += 1.0
            assert torch.equal(linear.weight, weight)


class Zeroing(nn.Module):
    """Buffers that its rule writes through `.data`, to what memory may hold anyway."""

    def __init__(self, value: int, count: int = 3) -> None:
        super().__init__()
        self.value = value
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64):
            self.register_buffer(str(dtype)[6:], torch.zeros(count, dtype=dtype))

    def _init_weights(self, module: nn.Module) -> None:
        for buffer in self.buffers():
            buffer.data.fill_(self.value)


@pytest.mark.parametrize(("value", "count"), [(0, 3), (1, 3), (0, 0)])
def test_integers_written_through_data_are_seen(value: int, count: int) -> None:
    with torch.device("meta"):
        model = Zeroing(value, count)
    give(model)
    assert all(torch.equal(buffer, torch.full_like(buffer, value)) for buffer in model.buffers())


class Breaking(Parent):
    """Its rule ends after it has written to one of two children."""

    def __init__(self) -> None:
        super().__init__(True)
        self.other, self.breaks = nn.Linear(3, 3), True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            if self.breaks:
                raise KeyError("halfway")
            nn.init.constant_(self.other.weight, 5.0)


def test_a_rule_that_ended_halfway_leaves_a_model_that_is_refused() -> None:
    with torch.device("meta"):
        model = Breaking()
    with pytest.raises(KeyError, match="halfway"):
        give(model)
    assert is_without_values(model)
    model.breaks = False
    for root in (model, nn.Sequential(model)):  # whoever holds it
        with pytest.raises(UsageError, match=r"ended at Breaking.*Build the model again"):
            give(root)
        assert is_without_values(root)


def test_a_change_that_the_version_shows_is_not_looked_for_in_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values may lie on another device by then, and comparing them makes the host wait."""
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    give(model)

    def compared(*_: Any) -> bool:
        raise AssertionError("values were compared")

    monkeypatch.setattr(torch, "equal", compared)
    with GatheredParameters(model.weight), torch.no_grad():
        model.weight.add_(1)
        model.weight.data = model.weight.detach().clone()
