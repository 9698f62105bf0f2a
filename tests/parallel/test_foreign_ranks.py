"""Optimizers of other packages: what one rank, a method or an attribute has that runs on copies do not show."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from deepspeed.errors import OptimizerError
from tests.parallel.test_foreign_optimizers import RANKS, ROWS, Clipping, engine_of, micro_batch, net
from tests.parallel.tiny import adamw, expect_close, loss_of, masters, raises, rows
from tests.parity.reference import Reference

STEPS = 3


class Clips(Clipping):
    """A global norm inside of the step: rank 0 updates everything."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.5)


class Writer:
    """A log's writer: it cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a thread")


class Both(torch.optim.SGD):
    """Matrices by itself, vectors by an optimizer inside, which its own groups do not name."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__([p for p in params if p.dim() > 1], lr=0.1)
        self.vectors = torch.optim.SGD([p for p in params if p.dim() < 2], lr=0.1)

    def step(self, closure: Any = None) -> Any:
        self.vectors.step()
        return super().step()


def with_a_writer(stage: int) -> dict[str, torch.Tensor]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Clips(parameters)
        if os.environ["RANK"] == "0":
            optimizer.writer = Writer()  # type: ignore[attr-defined]
        return optimizer

    engine = engine_of(stage, make)
    for step in range(STEPS):
        micro_batch(engine, step)
        engine.step()
    values = masters(engine)
    engine.destroy()
    return values


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_one_rank_cannot_copy_is_decided_by_all(workers: Any, stage: int) -> None:
    twin = Reference(net(), Clips, RANKS)
    for step in range(STEPS):
        for rank in range(RANKS):
            twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank, ROWS)))
        twin.step()
    for values in workers(RANKS).run(with_a_writer, stage, timeout=60):
        expect_close(values, twin.parameters(), 1e-5)


def looks(stage: int, folder: str) -> list[Any]:
    engine = engine_of(stage, Clips)
    micro_batch(engine, 0)
    engine.step()

    def look() -> list[Any]:
        state = engine.optimizer.state
        entry = state[next(engine.module.parameters())]
        return [len(state), list(entry), "nothing" in entry, tuple(entry["momentum_buffer"].shape)]

    seen = [look()]
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = engine_of(stage, Clips)
    engine.load_checkpoint(folder)
    seen.append(look())
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ranks_without_any_state_answer_as_the_owner(workers: Any, tmp_path: Any, stage: int) -> None:
    owner, other = workers(RANKS).run(looks, stage, str(tmp_path), timeout=60)
    assert owner == other
    assert owner == [[8, ["momentum_buffer"], False, (6, 6)]] * 2


def hidden_parameters(stage: int) -> None:
    with raises(OptimizerError, "Both", "vectors", "param_groups"):
        engine_of(stage, Both)


def placeholder_of_another(folder: str) -> tuple[torch.Tensor, ...]:
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = engine_of(1, adamw, "nvme", folder)
    micro_batch(engine, 0)
    engine.step()
    state, layers = engine.optimizer.state, engine.module.layers
    first, second = layers[0][0].weight, layers[1][0].weight
    wanted = state[second]["exp_avg"].clone()
    state[first]["exp_avg"] = state[second]["exp_avg"]
    got = safe_get_full_optimizer_state(first, "exp_avg")
    assert got is not None
    return wanted, got.clone()


def functional(stage: int) -> None:
    engine = engine_of(stage, adamw)
    before = masters(engine)
    fast = {f"module.{n}": (2 * p.detach()).requires_grad_() for n, p in engine.module.named_parameters()}
    out = torch.func.functional_call(engine, fast, (rows(0, 0),))
    grads = torch.autograd.grad(out.square().sum(), list(fast.values()))
    assert all(float(grad.abs().max()) > 0 for grad in grads)
    expect_close(masters(engine), before, 0.0)
    engine.destroy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_of_an_optimizer_inside_that_are_in_no_group(workers: Any, stage: int) -> None:
    workers(1).run(hidden_parameters, stage, timeout=60)


def test_assigning_the_state_of_another_parameter_on_disk(workers: Any, tmp_path: Any) -> None:
    [(wanted, got)] = workers(1).run(placeholder_of_another, str(tmp_path), timeout=60)
    assert torch.equal(wanted, got)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_functional_call_of_the_engine_leaves_its_parameters(workers: Any, stage: int) -> None:
    workers(1).run(functional, stage, timeout=60)
