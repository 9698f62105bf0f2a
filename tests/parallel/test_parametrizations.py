"""`torch.nn.utils.parametrize` and its relatives: born sharded, registered while gathered, saved, loaded, removed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import deepspeed
from deepspeed.errors import ShardedParameterError
from tests.parallel.tiny import STAGES, WIDTH, adamw, expect_close, loss_of, masters, micro_step, raises, rows, start

slow = pytest.mark.slow
FREED = {"stage3_param_persistence_threshold": 0} | dict.fromkeys(
    ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
)


class Symmetric(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.triu() + value.triu(1).T


class SymmetricBothWays(Symmetric):
    def right_inverse(self, value: torch.Tensor) -> torch.Tensor:
        return value.triu()


class Product(nn.Module):
    """Two originals."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.unsqueeze(-1) @ right.unsqueeze(-2)

    def right_inverse(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return value[:, 0].clone(), value[0].clone()


class Gain(nn.Module):
    """With a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH, WIDTH), 0.7))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.gain


def registered(*parts: Callable[[], nn.Module], name: str = "weight") -> Callable[[nn.Linear], Any]:
    def register(layer: nn.Linear) -> Any:
        for part in parts:
            parametrize.register_parametrization(layer, name, part())
        return layer

    return register


def assigned(layer: nn.Linear) -> nn.Linear:
    registered(SymmetricBothWays)(layer)
    layer.weight = torch.eye(WIDTH)  # type: ignore[assignment]
    return layer


def removed(how: Callable[[nn.Linear], Any], leave: bool = True) -> Callable[[nn.Linear], Any]:
    return lambda layer: parametrize.remove_parametrizations(how(layer), "weight", leave_parametrized=leave)


HOW: dict[str, Callable[[nn.Linear], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "one way": registered(Symmetric),
    "both ways": registered(SymmetricBothWays),
    "two originals": registered(Product),
    "its own parameter": registered(Gain),
    "chain": registered(Symmetric, Gain),
    "bias": registered(nn.Tanh, name="bias"),
    "assigned": assigned,
    "removed weight_norm": removed(parametrizations.weight_norm),
    "removed spectral_norm": removed(parametrizations.spectral_norm),
    "removed, not left": removed(registered(Symmetric), leave=False),
    "removed old weight_norm": lambda layer: nn.utils.remove_weight_norm(nn.utils.weight_norm(layer)),
}
WRITES = ("orthogonal", "cayley", "both ways", "assigned")  # their registration changes values


class Net(nn.Module):
    """Parametrized layers outside of blocks and in blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.first = HOW[how](nn.Linear(WIDTH, WIDTH))
            self.layers = nn.ModuleList(nn.Sequential(HOW[how](nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def net(how: str, born: bool) -> Net:
    torch.manual_seed(3)
    with deepspeed.zero.Init() if born else contextlib.nullcontext():
        return Net(how)


class Twin:
    """The same net in plain torch, trained on the rows of all ranks; buffers are those after one rank's forward."""

    def __init__(self, how: str) -> None:
        self.net = net(how, born=False)
        self.optimizer = adamw(self.net.parameters())

    def step(self, step: int) -> None:
        ranks, before = dist.get_world_size(), {k: b.clone() for k, b in self.net.named_buffers()}
        for rank in range(ranks):
            for name, buffer in self.net.named_buffers():
                buffer.copy_(before[name])
            (loss_of(self.net, rows(step, rank)) / ranks).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}


def engine_of(how: str, stage: int, born: bool) -> Any:
    model = net(how, born)
    whole = [name for name, param in model.named_parameters() if not hasattr(param, "ds_id")]
    assert not (born and whole), whole  # no rank keeps one until `initialize`
    return start(stage, model, adamw, sharded=False, zero=FREED if stage == 3 else {})


def trains_and_resumes(how: str, born: bool, stage: int, other: int, folder: str) -> None:
    """As in torch; a checkpoint goes on in a new engine at another stage."""
    twin = Twin(how)
    with engine_of(how, stage, born) as engine:
        model = engine.module
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.net.named_parameters()]
        expect_close(masters(engine), twin.values(), 0, how)
        for step in range(2):
            micro_step(engine, step)
            twin.step(step)
        expect_close(masters(engine), twin.values(), at=(how, "trained"))
        engine.save_checkpoint(folder, how)
    with engine_of(how, other, born=other == 3) as engine:
        micro_step(engine, 9)
        engine.load_checkpoint(folder, how)
        expect_close(masters(engine), twin.values(), at=(how, "loaded"))
        micro_step(engine, 2)
        twin.step(2)
        expect_close(masters(engine), twin.values(), at=(how, "resumed"))


def several(cells: list[tuple[str, bool, int, int]], folder: str) -> None:
    for how, born, stage, other in cells:
        trains_and_resumes(how, born, stage, other, folder)


def test_they_are_born_sharded_and_resume(workers: Any, tmp_path: Path) -> None:
    kinds = ("spectral_norm", "old weight_norm", "two originals", "removed weight_norm")
    workers(2).run(several, [(how, True, 3, 3) for how in kinds], str(tmp_path), timeout=90)


@slow
@pytest.mark.parametrize(
    ("born", "stage", "other"), [(True, 3, 3), (True, 3, 1), (False, 3, 0), (False, 2, 3), (False, 1, 3)]
)
def test_they_resume_at_another_stage(workers: Any, born: bool, stage: int, other: int, tmp_path: Path) -> None:
    workers(2).run(several, [(how, born, stage, other) for how in HOW], str(tmp_path), timeout=180)


def registered_later(stage: int, folder: str) -> None:
    """On the model of an engine: with what changes values, in GatheredParameters, as the error says."""
    for how in ("one way", "both ways", "cayley"):
        twin = Twin("removed, not left")
        with engine_of("removed, not left", stage, born=False) as engine:
            micro_step(engine, 0)
            twin.step(0)
            layer = engine.module.layers[0][0]
            if stage == 3 and how in WRITES:
                with raises(ShardedParameterError, "set_ on parameter 'layers.0.0.weight'", "GatheredParameters"):
                    HOW[how](layer)
            with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0, enabled=how in WRITES):
                HOW[how](layer)
            HOW[how](twin.net.layers[0][0])  # type: ignore[index]
            micro_step(engine, 1)
            twin.step(1)
            expect_close(masters(engine), twin.values(), at=(how, stage))
            engine.save_checkpoint(folder, how)
            micro_step(engine, 2)
            engine.load_checkpoint(folder, how)
            expect_close(masters(engine), twin.values(), at=(how, stage, "loaded"))


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=() if stage == 3 else slow) for stage in STAGES])
def test_they_are_registered_on_an_engines_model(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(registered_later, stage, str(tmp_path), timeout=60)


class Wrapped(nn.Module):
    """Registers a parametrization before a layer's forward and takes it off after it, as PEFT does."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift

        class Shifted(nn.Module):
            def forward(self, value: torch.Tensor) -> torch.Tensor:
                return value + shift

        trained = self.base.weight.requires_grad
        parametrize.register_parametrization(self.base, "weight", Shifted())
        self.base.parametrizations.weight.original.requires_grad_(trained)  # type: ignore[union-attr]
        try:
            with parametrize.cached():
                return torch.tanh(self.base(x))
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def registered_in_forward(stage: int) -> None:
    for blocks in (1, 3):
        for frozen in (False, True):
            torch.manual_seed(0)
            model, twin = (nn.Sequential(*(Wrapped() for _ in range(blocks)), nn.Linear(WIDTH, 3)) for _ in range(2))
            for one in (model, twin):
                for number, param in enumerate(one.parameters()):
                    param.requires_grad_(not frozen or number % 3 != 1)
            twin.load_state_dict(model.state_dict())
            plain = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
            with start(stage, model, sharded=False, zero=FREED if stage == 3 else {}) as engine:
                for step in range(3):
                    for rank in range(dist.get_world_size()):
                        (loss_of(twin, rows(step, rank)) / dist.get_world_size()).backward()
                    plain.step()
                    plain.zero_grad()
                    micro_step(engine, step)
                with deepspeed.zero.GatheredParameters(list(model.parameters())):
                    ours = {name: p.detach().clone() for name, p in model.named_parameters()}
                wanted = {name: p.detach() for name, p in twin.named_parameters()}
                expect_close(ours, wanted, at=(stage, blocks, frozen))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_they_are_registered_in_every_forward(workers: Any, stage: int) -> None:
    workers(2).run(registered_in_forward, stage)


def wrapped_anew(stage: int) -> None:
    """`nn.Parameter(managed)`: the memory of what is whole, the values of what is sharded or gathered for a while."""
    with engine_of("removed, not left", stage, born=False) as engine:
        weight = engine.module.out.weight
        value = weight.detach().clone()
        for source in (weight, weight.detach(), weight.data, weight[:2]):
            made = nn.Parameter(source, requires_grad=False)
            assert type(made) is nn.Parameter and not made.requires_grad, type(made)
            assert torch.equal(made, value[: len(made)])
            assert (made.data_ptr() == weight.data_ptr()) if stage < 3 else made.data_ptr()
        with deepspeed.zero.GatheredParameters(weight):
            inside = nn.Parameter(weight)
            assert inside.requires_grad and torch.equal(inside, value)
        micro_step(engine, 0)
        assert torch.equal(inside, value) == (stage == 3)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_is_made_of_a_managed_one(workers: Any, stage: int) -> None:
    workers(2).run(wrapped_anew, stage)


def replaced_later(stage: int, folder: str) -> None:
    """Parameters that left the model are no part of what is saved; those that came are."""
    with engine_of("removed, not left", stage, born=False) as engine:
        parametrizations.weight_norm(engine.module.first)
        micro_step(engine, 0)
        assert engine.save_16bit_model(folder, "weights.bin")
        dist.barrier()
        saved, state = torch.load(Path(folder) / "weights.bin"), engine.module.state_dict()
        assert saved.keys() == state.keys() and "first.parametrizations.weight.original0" in saved
        assert all(torch.equal(saved[name], value) for name, value in state.items())


@pytest.mark.parametrize("stage", [0, 1])
def test_what_left_the_model_is_not_saved(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(replaced_later, stage, str(tmp_path))
