"""Every optimizer at every stage equals the dense one, and every schedule steps once per applied update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.tiny import STAGES, WIDTH, Tiny, expect_close, loss_of, masters, micro_step, raises, rows, start
from tests.parity.configs import config
from tests.parity.reference import OptimizerFactory, Reference

STEPS = 5
RANKS = 2
LR = 1e-2
CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = ("LBFGS", "SparseAdam")
NAMED = ("Adam", "AdamW", "Lion", "Adagrad", "LAMB", "SGD", "Muon")
OPTIONS = {"Adam": {"eps": 1e-4}, "AdamW": {"eps": 1e-4}, "SGD": {"momentum": 0.9}}


class Matrices(nn.Module):
    """Layers without biases: torch's Muon takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def options(name: str) -> dict[str, float]:
    return {"lr": LR, **OPTIONS.get(name, {})}


def of_torch(name: str) -> OptimizerFactory:
    return lambda parameters: CLASSES[name](parameters, **options(name))


def of_the_json(name: str) -> OptimizerFactory:
    """The class that a name in the JSON stands for."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import FusedLion
    from deepspeed.ops.muon import Muon

    kinds = {"Adam": FusedAdam, "AdamW": FusedAdam, "Lion": FusedLion, "LAMB": FusedLamb, "Muon": Muon}
    return lambda parameters: kinds.get(name, CLASSES.get(name))(parameters, **options(name))


def start_named(stage: int, name: str, kind: type[nn.Module] = Tiny) -> Any:
    """An engine whose optimizer the JSON names."""
    import deepspeed

    model = seeded(kind)
    section = {"type": name, "params": options(name)}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, model, optimizer=section)
    )
    return engine


def train(engine: Any) -> dict[str, torch.Tensor]:
    """Masters after a few steps."""
    for step in range(STEPS):
        micro_step(engine, step)
    values = masters(engine)
    engine.destroy()
    return values


def train_client(stage: int, kind: type[nn.Module], name: str) -> dict[str, torch.Tensor]:
    return train(start(stage, seeded(kind), of_torch(name)))


def train_named(stage: int, name: str) -> dict[str, torch.Tensor]:
    return train(start_named(stage, name))


def dense(kind: type[nn.Module], optimizer: OptimizerFactory) -> dict[str, torch.Tensor]:
    twin = Reference(seeded(kind), optimizer, RANKS)
    for step in range(STEPS):
        for rank in range(RANKS):
            twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank)))
        twin.step()
    return twin.parameters()


@pytest.mark.drawn(13)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in REFUSED])
def test_every_class_of_torch_equals_the_dense_one(workers: Any, name: str, stage: int) -> None:
    kind = Matrices if name == "Muon" else Tiny
    for values in workers(RANKS).run(train_client, stage, kind, name):
        expect_close(values, dense(kind, of_torch(name)))


@pytest.mark.drawn(7)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NAMED)
def test_every_name_of_the_json_equals_its_class(workers: Any, name: str, stage: int) -> None:
    for values in workers(RANKS).run(train_named, stage, name):
        expect_close(values, dense(Tiny, of_the_json(name)))


class Speaker(nn.Module):
    """Matrices of every kind: an embedding, two maps, one of which the user takes out, and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, WIDTH)
        self.map, self.kept = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, 7)
        self.kept.weight.use_muon = False  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.kept(self.map(x + self.words.weight[0]))) + self.words(x.argmax(1)).sum()


def by_muon(stage: int) -> set[str]:
    """Names of the parameters that Muon moves along an orthogonal direction."""
    from deepspeed.utils import safe_get_full_optimizer_state

    with start_named(stage, "Muon", Speaker) as engine:
        micro_step(engine, 0)
        named = list(engine.module.named_parameters())
        assert all(p.use_muon is False for name, p in named if "words" in name or "head" in name)
        momenta = {name: safe_get_full_optimizer_state(p, "momentum_buffer") for name, p in named}
        moments = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in named}
        assert all((momenta[name] is None) != (moments[name] is None) for name, _ in named)
        return {name for name, momentum in momenta.items() if momentum is not None}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_muon_leaves_embeddings_heads_and_marked_parameters_to_adam(workers: Any, stage: int) -> None:
    assert workers(RANKS).run(by_muon, stage) == [{"map.weight"}] * RANKS


def refuse(stage: int) -> None:
    from deepspeed.errors import OptimizerError

    for name in REFUSED:
        with raises(OptimizerError, name):
            start(stage, optimizer=of_torch(name))
        with raises(OptimizerError, name):
            start_named(stage, name)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", STAGES)
def test_two_classes_are_refused_by_name(workers: Any, stage: int) -> None:
    workers(RANKS).run(refuse, stage)


UPDATES = 12
SCHEDULES: dict[str, dict[str, Any]] = {  # every phase of each lies within the updates
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 10, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 10, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "decay_step_size": 1},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 5},
}


def momentum_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def rates_of(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def make_schedule(name: str) -> Callable[[torch.optim.Optimizer], Any]:
    from deepspeed.optim import lr_schedules

    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    return lambda optimizer: kind(optimizer, **SCHEDULES[name])


def rates_in_training(name: str, accumulation: int, by_json: bool) -> list[list[float]]:
    """Learning rates before the first and after every micro-batch."""
    section = {"scheduler": {"type": name, "params": SCHEDULES[name]}} if by_json else {}
    passed = {} if by_json else {"lr_scheduler": make_schedule(name)}
    engine = start(1, optimizer=momentum_sgd, accumulation=accumulation, **passed, **section)
    rates = [rates_of(engine.optimizer)]
    for step in range(UPDATES * accumulation):
        micro_step(engine, step)
        rates.append(rates_of(engine.optimizer))
        assert engine.get_lr() == rates[-1]
    engine.destroy()
    return rates


def rates_of_all() -> dict[tuple[str, int, bool], list[list[float]]]:
    cases = [
        (name, accumulation, by_json) for name in SCHEDULES for accumulation in (1, 4) for by_json in (True, False)
    ]
    return {case: rates_in_training(*case) for case in cases}


def plain_rates(name: str, accumulation: int) -> list[list[float]]:
    """The same from a plain loop that steps the schedule after each update."""
    optimizer = momentum_sgd([nn.Parameter(torch.zeros(1))])
    schedule = make_schedule(name)(optimizer)
    rates = [rates_of(optimizer)]
    for _ in range(UPDATES):
        rates += [rates[-1]] * (accumulation - 1)
        optimizer.step()
        schedule.step()
        rates.append(rates_of(optimizer))
    return rates


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
def test_schedules_step_once_per_update(workers: Any, ranks: int) -> None:
    for outcome in workers(ranks).run(rates_of_all, timeout=120):
        for (name, accumulation, by_json), rates in outcome.items():
            assert rates == plain_rates(name, accumulation), f"{name}, accumulation {accumulation}, json {by_json}"
