"""What small copies of an optimizer tell about it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import OptimizerError
from deepspeed.optim.nested import Counters, NestedState, join_states, nested_optimizers
from deepspeed.optim.separability import _Copy, update_traits
from tests.parallel.tiny import said, with_words


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in [(100, 64), (64,), (64, 64), (64,), (5, 3, 3, 3)]]


class Plain(torch.optim.Optimizer):
    """Gradient descent; what a subclass adds is what is looked for."""

    def __init__(self, params: Any, lr: float = 0.1, **attributes: Any) -> None:
        super().__init__(params, {"lr": lr})
        vars(self).update(attributes)
        self.updates = 0

    def leaves(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.factor() * group["lr"] * p.grad)

    def factor(self) -> Any:
        return 1.0


class ByNorm(Plain):
    def factor(self) -> Any:
        return 1 / (1 + sum(p.grad.square().sum() for p in self.leaves()).sqrt())


class ByCount(Plain):
    def factor(self) -> Any:
        return 1 / len(self.leaves())


class CountsHidden(Plain):
    """Its counter lies where no copy of plain values finds it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.hidden = iter(range(1, 1000))

    def factor(self) -> Any:
        return 1.0

    def step(self, closure: Any = None) -> None:
        scale = next(self.hidden)
        for p in self.leaves():
            p.data.sub_(0.01 * p.grad / scale)


class Random(Plain):
    def factor(self) -> Any:
        return torch.rand(())


class Modular(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params, model=nn.Linear(2, 2))


class Averaging(Plain):
    """Writes parameters in a method of its own, and reads gradients in another."""

    def swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)

    def ascend(self) -> None:
        for p in self.leaves():
            p.data.add_(p.grad)

    def report(self) -> int:
        return len(self.param_groups)


@pytest.mark.parametrize(
    ("make", "by_parameter", "in_parts"), [(Plain, True, True), (ByNorm, False, False), (ByCount, False, False)]
)
def test_an_update_that_looks_at_other_parameters_is_found(make: Any, by_parameter: bool, in_parts: bool) -> None:
    traits = update_traits(make(parameters()))
    assert (traits.by_parameter, traits.in_parts) == (by_parameter, in_parts), traits
    assert not traits.known and not traits.unknown


def test_a_schedule_that_begins_at_zero_hides_nothing() -> None:
    assert not update_traits(ByNorm(parameters(), lr=0.0)).by_parameter


def test_a_counter_that_cannot_be_put_back_is_found() -> None:
    optimizer = CountsHidden(parameters())
    traits = update_traits(optimizer)
    assert traits.unknown or not traits.in_parts, traits
    assert next(optimizer.hidden) == 1  # the optimizer itself has not counted


@pytest.mark.parametrize(("make", "why"), [(Random, "random"), (Modular, "module")])
def test_what_cannot_be_known_is_said(make: Any, why: str) -> None:
    assert why in update_traits(make(parameters())).unknown


def test_methods_that_write_are_found_and_told_from_those_that_read() -> None:
    methods = update_traits(Averaging(parameters())).methods
    assert set(methods) == {"swap", "ascend"}
    assert not methods["swap"].reads_gradients and methods["ascend"].reads_gradients


def test_nothing_changes_by_being_looked_at() -> None:
    params = parameters()
    optimizer = Averaging(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in params], torch.get_rng_state(), optimizer.updates, torch.get_num_threads()
    update_traits(optimizer)
    assert all(torch.equal(p, old) for p, old in zip(params, before[0], strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (optimizer.updates, torch.get_num_threads()) == before[2:]


class Wrapper(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.Adam(self.param_groups, lr=0.1)
        self.others = [torch.optim.SGD(parameters(), lr=0.1)]

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_nested_state_lies_in_the_outer_optimizer() -> None:
    optimizer = Wrapper(params := parameters())
    assert list(nested_optimizers(optimizer)) == ["base", "others.0"]
    join_states(optimizer)
    join_states(optimizer)  # a second time changes nothing
    assert isinstance(optimizer.base.state, NestedState)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert set(optimizer.state[params[0]]) == {"base.step", "base.exp_avg", "base.exp_avg_sq"}
    assert len(optimizer.base.state) == len(params) and params[0] in optimizer.base.state
    del optimizer.base.state[params[0]]
    assert params[0] not in optimizer.base.state and not optimizer.state[params[0]]
    with pytest.raises(KeyError):
        del optimizer.base.state[params[0]]


def test_counters_of_groups_and_objects_are_put_back() -> None:
    optimizer = Wrapper(parameters())
    optimizer.history, optimizer.rate = [1, 2], torch.tensor(3.0)
    counters = Counters.of(optimizer)
    optimizer.updates, optimizer.param_groups[0]["k"] = 7, 1
    optimizer.history.append(3)
    optimizer.rate.add_(1)
    counters.restore()
    assert optimizer.updates == 0 and "k" not in optimizer.param_groups[0]
    assert optimizer.history == [1, 2] and optimizer.rate == 3.0


# -- what a class does besides ----------------------------------------------------------------------------------------


class _Chatty(torch.optim.SGD):
    """Many methods, one of which writes weights and one a file; a function of its own that counts; random numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.steps = 0
        self.count = lambda: setattr(self, "steps", self.steps + 1)

    def step(self, closure: Any = None) -> Any:
        self.count()
        random.random()
        return super().step(closure)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(2)

    def dump(self, path: str = "dumped_by_a_probe.pt") -> None:
        torch.save(self.state_dict(), path)


for _number in range(9):
    setattr(_Chatty, f"a{_number}", lambda self: None)


class _Idle(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return None


def test_a_run_leaves_the_optimizer_the_disk_and_random_numbers(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    optimizer = _Chatty([nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))])
    random.seed(3)
    traits = update_traits(optimizer)
    drawn = random.random()
    random.seed(3)
    assert drawn == random.random()
    assert optimizer.steps == 0
    assert not list(tmp_path.iterdir())
    assert list(traits.methods) == ["train"]  # of more methods than are tried in pairs


def test_steps_that_move_nothing_show_nothing() -> None:
    assert "moved" in update_traits(_Idle([nn.Parameter(torch.ones(3))], lr=0.1)).unknown


def test_many_groups_cost_no_more_steps_than_a_few() -> None:
    groups = [{"params": parameters(), "lr": 0.1 / (1 + index)} for index in range(30)]
    optimizer = ByNorm(groups)
    optimizer.param_groups[-1]["flag"] = True
    copied = _Copy(optimizer)
    assert [bool(group["params"]) for group in copied.optimizer.param_groups] == [True] * 4 + [False] * 25 + [True]
    assert not update_traits(optimizer).by_parameter


class OwnList(Plain):
    """Updates parameters that it has put aside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.aside = {"all": [p for group in self.param_groups for p in group["params"]]}

    def leaves(self) -> list[torch.Tensor]:
        return [p for p in self.aside["all"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.leaves():
            p.sub_(0.1 * p.grad)


class OwnTable(Plain):
    """Looks each parameter up in a table that was made at the start."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scales = {p: 0.5 for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.leaves():
            p.sub_(self.scales[p] * p.grad)


class NamesList(OwnList):
    """Has the list, and does not use it."""

    def leaves(self) -> list[torch.Tensor]:
        return Plain.leaves(self)


@pytest.mark.parametrize(
    ("make", "attribute"), [(OwnList, "aside"), (OwnTable, "scales"), (NamesList, ""), (Plain, "")]
)
def test_parameters_that_are_kept_beside_the_groups_are_found(make: Any, attribute: str) -> None:
    traits = update_traits(make(parameters()))
    assert traits.kept_in == attribute and not traits.unknown, traits


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({"bf16": {"enabled": True}}, "fp16 or bf16"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 2}}, ""),
    ],
)
def test_they_are_refused_at_initialize_where_the_groups_get_others(settings: Any, reason: str, alone: None) -> None:
    import deepspeed

    model = nn.Linear(4, 2)
    config = {"train_batch_size": 4, **settings}
    if reason:
        with pytest.raises(OptimizerError, match=f"OwnList updates .* attribute 'aside' .*{reason}"):
            deepspeed.initialize(model=model, optimizer=OwnList(model.parameters()), config=config)
        return
    before = model.weight.detach().clone()
    with deepspeed.initialize(model=model, optimizer=OwnList(model.parameters()), config=config)[0] as engine:
        engine.backward(engine(torch.ones(4, 4)).square().mean())
        engine.step()
        assert not torch.equal(model.weight, before)


def test_of_two_optimizers_the_one_that_is_used_is_said(alone: None) -> None:
    from deepspeed.engine.build import choose_optimizer

    model = nn.Linear(4, 2)
    config = DeepSpeedConfig({"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    with said() as lines:
        for _ in range(2):
            assert choose_optimizer(model, client, None, config) is client
        assert with_words(lines, "the SGD passed to initialize is used, and the AdamW", "is not") == 1, lines
        choose_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1), None, config)
        assert with_words(lines, "the optimizer of the callable passed to initialize is used") == 1, lines
        assert choose_optimizer(model, None, None, config) is not client
        assert len(lines) == 2, lines
