"""Gradients of gradients: any order, inner loops, penalties; a graph that outlives a step is refused, as in torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.tiny import WIDTH, expect_close, masters, micro_step, raises, rows, start

slow = pytest.mark.slow
NOTHING = {"max_live_parameters": 0, "max_reuse_distance": 0, "prefetch_bucket_size": 0}
LIMITS = {"nothing": {f"stage3_{key}": value for key, value in NOTHING.items()}, "default": {}}
WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "fixed graph": {"stage3_fixed_graph": True},
    "offloaded": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


class Mixed(nn.Module):
    """Autograd saves the parameters of a norm, of a product and of a power themselves, and views of the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)) * self.scale.square())


class Twice(nn.Module):
    """One matrix used in two ways, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x @ self.matrix @ self.matrix.t() * self.bias), (x * self.bias).square() * self.matrix[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.out = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(self.kernel(x.unsqueeze(1)).flatten(1)))


class Again(nn.Module):
    """Computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mixed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Times(torch.autograd.Function):
    """A product, as users write their own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class InPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(Times.apply(x, self.weight)))  # type: ignore[arg-type]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "two outputs": Twice,
    "convolution": Convolution,
    "checkpointed": Again,
    "in Python": InPython,
}


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x = x if isinstance(x, torch.Tensor) else x[0] + 0.1 * x[1]
        return self.out(x)


def module_of(model: Any) -> nn.Module:
    return getattr(model, "module", model)


def of_inputs(model: Any, x: torch.Tensor, order: int) -> torch.Tensor:
    """A penalty on the derivatives of every order below `order` with respect to the input."""
    x = x.clone().requires_grad_()
    value = total = torch.tanh(model(x)).sum()
    for _ in range(order - 1):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = slope.square().sum()
        total = total + value
    return total


def of_parameters(model: Any, x: torch.Tensor, order: int) -> torch.Tensor:
    value = total = torch.tanh(model(x)).square().mean()
    for _ in range(order - 1):
        slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        value = torch.stack([slope.square().mean() for slope in slopes]).sum()
        total = total + value
    return total


def inner_loop(model: Any, x: torch.Tensor, order: int) -> torch.Tensor:
    """MAML: the loss after `order - 1` steps on fast weights."""
    fast: dict[str, Any] = dict(module_of(model).named_parameters())
    for _ in range(order - 1):
        loss = torch.func.functional_call(module_of(model), fast, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: value - 0.1 * slope for (name, value), slope in zip(fast.items(), slopes, strict=True)}
    return torch.func.functional_call(module_of(model), fast, (x,)).square().mean()


LOSSES = {"inputs": of_inputs, "parameters": of_parameters, "inner loop": inner_loop}


def equals_torch(kind: str, loss: str, order: int, stage: int, limits: str, way: str) -> None:
    torch.manual_seed(0)
    model = Stack(kind)
    twin, of = copy.deepcopy(model), LOSSES[loss]
    plain = torch.optim.SGD(twin.parameters(), lr=1e-2)
    zero = {"stage3_param_persistence_threshold": 0} | LIMITS[limits] | WAYS[way] if stage == 3 else {}
    with start(stage, model, lambda ps: torch.optim.SGD(ps, lr=1e-2), sharded=False, zero=zero) as engine:
        for step in range(2):
            for rank in range(dist.get_world_size()):
                (of(twin, rows(step, rank), order) / dist.get_world_size()).backward()
            plain.step()
            plain.zero_grad()
            value = of(engine, rows(step, dist.get_rank()), order)
            engine.backward(value)
            del value
            engine.step()
        wanted = {name: p.detach() for name, p in twin.named_parameters()}
        assert all(p.isfinite().all() for p in wanted.values())
        expect_close(masters(engine), wanted, at=(kind, loss, order, stage, limits, way))


def several(cells: list[tuple[Any, ...]]) -> None:
    for cell in cells:
        equals_torch(*cell)


EVERY = [(*cell, 3, limits) for cell in itertools.product(BLOCKS, LOSSES, (2, 3, 4)) for limits in LIMITS]


def test_gradients_of_any_order_equal_torchs(workers: Any) -> None:
    cells = [("mixed", loss, 3, 3, "nothing", "device") for loss in LOSSES]
    cells += [(kind, "inner loop", 3, 3, "default", "device") for kind in BLOCKS]
    workers(2).run(several, [*cells, ("mixed", "inputs", 4, 3, "nothing", "fixed graph")], timeout=60)


@slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_model_loss_order_and_limit(workers: Any, kind: str, way: str) -> None:
    workers(2).run(several, [(*cell, way) for cell in EVERY if cell[0] == kind], timeout=180)


@slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_other_stages(workers: Any, stage: int) -> None:
    cells = [(kind, loss, 3, stage, "default", "device") for kind in BLOCKS for loss in LOSSES]
    workers(2).run(several, cells, timeout=180)


def outlives_a_step(kind: str, limits: str) -> None:
    torch.manual_seed(0)
    zero = {"stage3_param_persistence_threshold": 0} | LIMITS[limits]
    with start(3, Stack(kind), sharded=False, zero=zero) as engine:
        x = rows(0, dist.get_rank()).requires_grad_()
        value = engine(x).tanh().sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        micro_step(engine, 1)
        for old in (value, slope.square().sum(), curve.square().sum()):
            with raises(RuntimeError):
                torch.autograd.grad(old, x, retain_graph=True)


@pytest.mark.parametrize("limits", LIMITS)
def test_a_graph_that_outlives_a_step_is_refused(workers: Any, limits: str) -> None:
    for kind in ("mixed", "convolution"):
        workers(2).run(outlives_a_step, kind, limits)


def memory_goes_with_the_graph() -> None:
    """What a graph of second order holds is freed with it."""
    torch.manual_seed(0)
    zero = {"stage3_param_persistence_threshold": 0} | LIMITS["nothing"]
    with start(3, Stack("mixed"), sharded=False, zero=zero) as engine:
        groups = {p._ds_member.group for p in engine.module.parameters()}

        def held() -> int:
            return sum(group.full.untyped_storage().nbytes() > 0 for group in groups)

        micro_step(engine, 0)
        assert held() == 0
        value = of_inputs(engine, rows(0, dist.get_rank()), 3)
        assert held() > 0
        engine.backward(value)
        del value
        engine.step()
        micro_step(engine, 1)  # what was held is given back when it is next freed
        assert held() == 0


def test_memory_goes_with_the_graph(workers: Any) -> None:
    workers(2).run(memory_goes_with_the_graph)
