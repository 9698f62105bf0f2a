"""Other tensors put where the model had its parameters: taken over before they are used, or refused by name."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import ShardedParameterError, UsageError
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.tiny import STAGES, adamw, loss_of, masters, raises, rows, said, start, tiny, with_words

RANKS = 2
WHOLE = {"stage3_param_persistence_threshold": 0}
WEIGHT = torch.linspace(-1, 1, 36).view(6, 6)


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    """Torch's future: conversions of modules swap."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def values(model: Any) -> torch.Tensor:
    return WEIGHT.to(model.layers[1][0].weight.dtype)


def swap(model: Any) -> None:
    torch.utils.swap_tensors(model.layers[1][0].weight, nn.Parameter(values(model)))


def swap_and_keep(model: Any) -> None:
    model.kept = [nn.Parameter(values(model))]
    torch.utils.swap_tensors(model.kept[0], model.layers[1][0].weight)


def load_by_swap(model: Any) -> None:
    with swapping():
        model.layers[1][0].load_state_dict({"weight": values(model), "bias": torch.zeros_like(values(model)[0])})


def load_by_swap_and_assign(model: Any) -> None:
    with swapping():
        model.layers[1][0].load_state_dict(
            {"weight": values(model), "bias": torch.zeros_like(values(model)[0])}, assign=True
        )


def double_by_swap(model: Any) -> None:
    with swapping():
        model.layers[1][0]._apply(lambda t: t.detach() * 2)


def data(model: Any) -> None:
    model.layers[1][0].weight.data = values(model)


def assign(model: Any) -> None:
    model.layers[1][0].weight = nn.Parameter(values(model))


def register(model: Any) -> None:
    model.layers[1][0].register_parameter("weight", nn.Parameter(values(model)))


def load_and_assign(model: Any) -> None:
    model.layers[1][0].load_state_dict(
        {"weight": values(model), "bias": torch.zeros_like(values(model)[0])}, assign=True
    )


def past_the_module(model: Any) -> None:
    model.layers[1][0]._parameters["weight"] = nn.Parameter(values(model))


def overwrite(model: Any) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.layers[1][0]._apply(lambda t: t.detach() * 2)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


SWAPS = (swap, swap_and_keep, load_by_swap, load_by_swap_and_assign, double_by_swap, data)
OTHERS = (assign, register, load_and_assign, past_the_module, overwrite)


def in_place(change: Callable[[Any], None], model: Any) -> None:
    """What the change does to the values, on a model whose parameters stay what they are."""
    layer = model.layers[1][0]
    with torch.no_grad():
        if change in (double_by_swap, overwrite):
            layer.weight.mul_(2)
            layer.bias.mul_(2)
            return
        layer.weight.copy_(WEIGHT)
        if change in (load_by_swap, load_by_swap_and_assign, load_and_assign):
            layer.bias.zero_()


def taken_over(stage: int, precision: str, where: str) -> None:
    """Trains on with the new values as a plain twin does whose parameters were changed in place."""
    for change in (*SWAPS, *OTHERS):
        model = tiny()
        twin = copy.deepcopy(model)
        plain = adamw(twin.parameters())
        zero = {"offload_optimizer": {"device": "cpu"}} if where == "cpu" else None
        with start(stage, model, optimizer=adamw, precision=precision, sharded=False, zero=zero) as engine:
            weight = model.layers[1][0].weight
            for step in range(4):
                if step == 2:
                    change(model)
                    in_place(change, twin)
                for rank in range(RANKS):
                    (loss_of(twin, rows(step, rank)) / RANKS).backward()
                plain.step()
                plain.zero_grad()
                run = model if where == "module" else engine  # past the engine's forward
                engine.backward(loss_of(run, rows(step, dist.get_rank()).to(weight.dtype)))
                engine.step()
            assert model.layers[1][0].weight is weight, change.__name__
            for key, ours in masters(engine).items():
                gap = float((ours - twin.get_parameter(key).detach()).abs().max())
                bar = 1e-5 if precision == "fp32" else 0.03
                assert gap <= bar, (stage, precision, where, change.__name__, key, gap)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_tensors_are_taken_over(workers: Any, stage: int) -> None:
    workers(RANKS).run(taken_over, stage, "fp32", "", timeout=90)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("stage", "precision", "where"), [(1, "bf16", ""), (2, "fp32", "cpu"), (1, "fp32", "module")])
def test_other_tensors_are_taken_over_everywhere(workers: Any, stage: int, precision: str, where: str) -> None:
    workers(RANKS).run(taken_over, stage, precision, where, timeout=90)


def refused_when_sharded() -> None:
    with start(3, optimizer=adamw, sharded=False, zero=WHOLE) as engine:
        model = engine.module
        layer, weight = model.layers[1][0], model.layers[1][0].weight
        before = safe_get_full_fp32_param(weight)
        if dist.get_rank() == 1:  # one rank alone: nobody waits
            for change in (swap, swap_and_keep):
                with raises(ShardedParameterError, "layers.1.0.weight", "GatheredParameters"):
                    change(model)
            for change in (assign, register, past_the_module):
                change(model)
                with raises(UsageError, "layers.1.0.weight", "GatheredParameters"):
                    engine(rows(0, 1))
                layer.weight = weight
        engine.backward(loss_of(engine, rows(0, dist.get_rank())))
        engine.step()
        assert (safe_get_full_fp32_param(weight) - before).abs().max() < 0.02


def test_other_tensors_are_refused_where_parameters_are_sharded(workers: Any) -> None:
    workers(RANKS).run(refused_when_sharded, timeout=60)


class Quantized(nn.Parameter):
    """As conversions make them."""


def misfits() -> None:
    for stage in (0, 1, 2):
        with start(stage, optimizer=adamw, sharded=False) as engine:
            model = engine.module
            layer, weight = model.layers[1][0], model.layers[1][0].weight
            before = masters(engine)
            if dist.get_rank() == 1:
                with raises(UsageError, "layers.1.0.weight", "Quantized"):
                    torch.utils.swap_tensors(weight, Quantized(torch.zeros(6, 6)))
                layer.weight = nn.Parameter(torch.zeros(3, 6))
                with raises(UsageError, "layers.1.0.weight", "(3, 6)"):
                    engine(rows(0, 1))
                layer.weight = weight
                other = nn.Parameter(torch.zeros(6, 6, dtype=torch.float16))
                torch.utils.swap_tensors(weight, other)
                with raises(UsageError, "layers.1.0.weight", "float16"):
                    engine(rows(0, 1))
                torch.utils.swap_tensors(weight, other)
            engine.backward(loss_of(engine, rows(0, dist.get_rank())))
            engine.step()
            after = masters(engine)
            assert all((after[name] - before[name]).abs().max() < 0.02 for name in before), stage


def test_what_does_not_fit_is_refused(workers: Any) -> None:
    workers(RANKS).run(misfits, timeout=60)


def borrowed_for_evaluation() -> None:
    """Merged weights for an evaluation, and the old parameter back: nothing is taken over."""
    for stage in STAGES:
        with start(stage, optimizer=adamw, sharded=False, zero=WHOLE if stage == 3 else None) as engine:
            layer = engine.module.layers[1][0]
            weight, before = layer.weight, masters(engine)
            layer.weight = nn.Parameter(WEIGHT.clone())
            engine.eval()
            with torch.no_grad():
                engine(rows(0, 0))
            engine.train()
            layer.weight = weight
            after = masters(engine)
            assert all(torch.equal(after[name], before[name]) for name in before), stage
            assert layer.weight is weight


def test_a_parameter_that_comes_back_is_as_it_was(workers: Any) -> None:
    workers(RANKS).run(borrowed_for_evaluation, timeout=60)


def said_once() -> None:
    with start(1, optimizer=adamw, sharded=False) as engine, said() as lines:
        for step in range(2):
            assign(engine.module)
            engine.backward(loss_of(engine, rows(step, dist.get_rank())))
            engine.step()
    assert with_words(lines, "layers.1.0.weight", "was replaced") == (1 if dist.get_rank() == 0 else 0)


def test_taking_over_is_said_once(workers: Any) -> None:
    workers(RANKS).run(said_once, timeout=60)
