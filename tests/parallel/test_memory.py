"""Bytes of training state on live tensors and by the estimators against the formula; what steps leave behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.zero.api.memory_estimate import estimate_zero3_model_states_mem_needs, state_bytes
from tests.parallel.tiny import STAGES, adamw, start

WIDTH, BLOCKS = 128, 12
BLOCK = WIDTH * WIDTH + WIDTH
PARAMETERS = BLOCK * BLOCKS  # about 200,000
LIMITS = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
ZERO = {"reduce_bucket_size": BLOCK} | dict.fromkeys(LIMITS, 2 * BLOCK + 64)
BAR = 0.03


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def live_bytes() -> int:
    """Bytes of all tensors made since `gc.freeze`, each storage once."""
    gc.collect()
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor):
                storages[found.untyped_storage()._cdata] = found.untyped_storage().nbytes()
    return sum(storages.values())


def micro_steps(engine: Any, count: int) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(1, WIDTH)).float().square().mean())
        engine.step()


def measured() -> list[tuple[str, float, float, float]]:
    """(cell, bytes per parameter on live tensors, by the engine's own count, transit buffers)."""
    found = []
    with start(0, Stack(), optimizer=adamw) as engine:  # maps the memory of the other ranks, once for all that follow
        micro_steps(engine, 1)
    del engine
    gc.collect()
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            for accumulation in (1, 2):
                gc.freeze()
                settings = {"precision": precision, "accumulation": accumulation, "zero": ZERO}
                with start(stage, Stack(), optimizer=adamw, **settings) as engine:
                    micro_steps(engine, accumulation)
                    live = live_bytes()
                    told = sum(engine.state_bytes().values())
                    wire = engine._components.reducer.reduce_scatter
                    buffers = [b for kind in (wire._pool, wire._received) for pool in kind.values() for b in pool]
                    transit = sum(b.untyped_storage().nbytes() for b in buffers)
                    assert transit <= 3 * 2 * 4 * (BLOCK + 64), [  # one round being filled, two travelling
                        stage,
                        precision,
                        accumulation,
                        [(b.numel(), b.dtype) for b in buffers],
                    ]
                    if stage == 3:
                        assert engine.zero_report()["peak"] <= 2 * BLOCK + 64
                cell = f"stage {stage}, {precision}, accumulation {accumulation}"
                found.append((cell, live / PARAMETERS, told / PARAMETERS, transit / PARAMETERS))
                gc.unfreeze()
    return found


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
def test_state_bytes_are_the_formula(workers: Any, ranks: int) -> None:
    wanted = [
        state_bytes(stage, ranks, low_precision=precision == "bf16", accumulating=accumulation > 1).total
        for stage in STAGES
        for precision in ("fp32", "bf16")
        for accumulation in (1, 2)
    ]
    for rank, cells in enumerate(workers(ranks).run(measured, timeout=90)):
        for (cell, live, told, transit), formula in zip(cells, wanted, strict=True):
            assert abs(told - formula) <= BAR * formula, (rank, cell, told, formula)
            assert abs(live - transit - formula) <= BAR * formula, (rank, cell, live, transit, formula)


def test_estimate_bounds_what_is_measured() -> None:
    sizes = {"reduce_bucket_size": BLOCK, "max_live_parameters": 2 * BLOCK}
    _, device, layer = estimate_zero3_model_states_mem_needs(PARAMETERS, BLOCK, 2, 1, False, False, **sizes)
    assert layer == 4 * BLOCK
    states = state_bytes(3, 2).total * PARAMETERS
    assert states < device <= states + 2 * PARAMETERS + 4 * 2 * BLOCK  # and what is gathered, and the buckets


class Pair(nn.Module):
    """A block of two inputs and two outputs, of which the last block's second goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x) + y, self.other(y)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = self.first(x)
        for layer in self.layers:
            x, y = layer(x, y)
        return x


def left_to_the_collector(stage: int, model: type[nn.Module]) -> None:
    module = model()
    engine = start(stage, module, optimizer=adamw, zero=ZERO)
    micro_steps(engine, 2)
    while gc.collect():
        pass
    gc.disable()
    try:
        micro_steps(engine, 3)
        engine(torch.ones(1, WIDTH))  # without a backward: what it saved goes with its output
        found = gc.collect()
    finally:
        gc.enable()
    assert found < 20, found  # a graph that holds itself is hundreds of objects
    trained = weakref.ref(next(module.parameters()))
    engine.destroy()
    del module, engine
    gc.collect()
    assert trained() is None


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", [Stack, Pairs])
@pytest.mark.parametrize("stage", STAGES)
def test_steps_leave_nothing_to_the_garbage_collector(workers: Any, stage: int, model: type[nn.Module]) -> None:
    workers(2).run(left_to_the_collector, stage, model)


def partly_asked() -> None:
    module = Pairs()
    engine = start(3, module, optimizer=adamw, zero=ZERO)
    seen: list[torch.Tensor] = []
    module.layers[2].register_forward_pre_hook(lambda _module, args: seen.extend(args))
    out = engine(torch.ones(1, WIDTH)).sum()
    (found,) = torch.autograd.grad(out, seen[1])  # the gradient of the block's other input is never made
    assert found.any()
    assert [group.users for group in engine.optimizer.groups] == [0] * len(engine.optimizer.groups)
    engine.destroy()


def test_a_pass_that_asks_for_some_inputs_uses_no_group_after_it(workers: Any) -> None:
    workers(2).run(partly_asked)
