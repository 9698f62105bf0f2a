"""A module that reads another one's parameter, whatever is freed between its forward and its backward: as in torch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deepspeed import zero
from deepspeed.zero.parameters.shard_group import State
from tests.parallel.test_higher_order import LIMITS, WAYS, Times
from tests.parallel.tiny import WIDTH, expect_close, raises, rows, start

slow = pytest.mark.slow
# The first block is still here after the last one, and has to go for what comes then: beside three blocks, or four.
SOME = {
    name: {f"stage3_max_{key}": value for key, value in sizes.items()} | {"stage3_prefetch_bucket_size": 0}
    for name, sizes in {
        "three": {"live_parameters": 320, "reuse_distance": 1000},
        "four": {"live_parameters": 360, "reuse_distance": 1000},
    }.items()
}
ALL_LIMITS = {**LIMITS, **SOME}
BARS = {"fp32": 1e-6, "bf16": 2e-2}


class Block(nn.Module):
    """Autograd saves `s`, `norm.weight` and `matrix` themselves, and a view of the linear's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.s = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.norm(self.linear(x)) * self.s) @ self.matrix * self.frozen
        self.aside = (self.s * x).square()
        return x


class Reads(nn.Module):
    """The last block reads what the first one owns."""

    def __init__(self, first: Block) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(WIDTH, WIDTH), [first]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.of[0].s)


Use = Callable[[Any, torch.Tensor], torch.Tensor]


def _functional_call(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    values = {"weight": blocks[0].norm.weight, "bias": blocks[1].norm.bias}
    return torch.func.functional_call(nn.LayerNorm(WIDTH), values, (x,))


def _dropped(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """Of what autograd saves of a parameter, something goes while something comes."""
    x = x * blocks[0].s
    blocks[0].aside = None
    gc.collect()
    return x


# What the root computes after the blocks, of parameters that are theirs.
USES: dict[str, Use] = {
    "elementwise": lambda blocks, x: x * blocks[0].s,
    "square": lambda blocks, x: x + blocks[1].s.square(),
    "product": lambda blocks, x: x @ blocks[0].matrix,
    "transposed": lambda blocks, x: functional.linear(x, blocks[0].matrix),
    "frozen": lambda blocks, x: x * blocks[0].frozen,
    "norm": lambda blocks, x: functional.layer_norm(x, (WIDTH,), blocks[0].norm.weight),
    "functional call": _functional_call,
    "in Python": lambda blocks, x: Times.apply(x, blocks[0].s),
    "checkpointed": lambda blocks, x: checkpoint(lambda y: y * blocks[0].s, x, use_reentrant=False),
    "twice": lambda blocks, x: x * blocks[0].s * blocks[1].s + x * blocks[0].s,
    "dropped": _dropped,
    "aside": lambda blocks, x: x + blocks[0].aside + blocks[2].aside,  # no output of a block leads to it
    "sibling": lambda blocks, x: Reads.forward(blocks[3], x),
}


class Model(nn.Module):
    def __init__(self, use: str, recompute: bool = False) -> None:
        super().__init__()
        self.use, self.recompute = use, recompute
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(3))
        if use == "sibling":
            self.blocks.append(Reads(self.blocks[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = USES[self.use](self.blocks, x) if self.use != "sibling" else x
        return self.out(torch.tanh(x))


def trained(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=1e-1)


def _between(model: Any, x: torch.Tensor) -> None:
    """An evaluation between a forward and its backward frees what the forward kept."""
    with torch.no_grad():
        model(x)


def equals_torch(use: str, limits: str, way: str, precision: str, recompute: bool, evaluated: bool, stage: int) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(0)
    model = Model(use, recompute)
    twin = copy.deepcopy(model)
    plain = trained(twin.parameters())
    zero = {"stage3_param_persistence_threshold": 0} | ALL_LIMITS[limits] | WAYS[way] if stage == 3 else {}
    with start(stage, model, trained, sharded=False, zero=zero, precision=precision) as engine:
        for step in range(2):
            for rank in range(dist.get_world_size()):
                (twin(rows(step, rank)).square().mean() / dist.get_world_size()).backward()
            plain.step()
            plain.zero_grad()
            x = rows(step, dist.get_rank()).to(next(engine.module.parameters()).dtype)
            loss = engine(x).float().square().mean()
            if evaluated:
                _between(engine, x)
            engine.backward(loss)
            engine.step()
        wanted = {name: p.detach() for name, p in twin.named_parameters() if p.requires_grad}
        ours: dict[str, Any] = {name: safe_get_full_fp32_param(engine.module.get_parameter(name)) for name in wanted}
        where = (use, limits, way, precision, recompute, evaluated, stage)
        expect_close(ours, wanted, BARS[precision], at=where)


def several(cells: list[tuple[Any, ...]]) -> list[str]:
    misses = []
    for cell in cells:
        try:
            equals_torch(*cell)
        except AssertionError as miss:
            misses.append(str(miss))
    return misses


def check(workers: Any, cells: list[tuple[Any, ...]]) -> None:
    for misses in workers(2).run(several, cells, timeout=180):
        assert not misses, "\n".join(misses)


def test_what_the_root_reads_of_its_blocks(workers: Any) -> None:
    cells = [(use, "four" if use == "sibling" else "three", "device", "fp32", False, False, 3) for use in USES]
    check(workers, [*cells, *[(use, "default", "device", "fp32", False, True, 3) for use in ("elementwise", "aside")]])


def test_what_is_computed_again_in_16_bits_and_by_collectives(workers: Any) -> None:
    cells = [("elementwise", "three", "device", precision, True, False, 3) for precision in BARS]
    cells += [("norm", "three", "device", "bf16", False, False, 3)]
    check(workers, [*cells, *[(use, "three", "fixed graph", "fp32", False, False, 3) for use in ("twice", "aside")]])


def memory_and_old_graphs(way: str) -> None:
    torch.manual_seed(0)
    zero = {"stage3_param_persistence_threshold": 0} | SOME["three"] | WAYS[way]
    with start(3, Model("elementwise"), trained, sharded=False, zero=zero) as engine:
        groups = {p._ds_member.group: i for i, block in enumerate(engine.module.blocks) for p in block.parameters()}

        def held() -> list[int]:
            for block in engine.module.blocks:
                block.aside = None
            for group in groups:
                group.wait_all_gather()
                group.reshard()
            return sorted({i for group, i in groups.items() if group.full.untyped_storage().nbytes()})

        x = rows(0, dist.get_rank()).requires_grad_()
        assert held() == []
        value = engine(x).square().mean()
        assert held() == [0]  # what autograd saves in a block's own graph costs no memory
        (wanted,) = torch.autograd.grad(value, x, retain_graph=True)
        assert wanted.isfinite().all()
        assert held() == [0]
        engine.backward(engine(x).square().mean())
        engine.step()
        with raises(RuntimeError):
            torch.autograd.grad(value, x)
        del value
        assert held() == []


@pytest.mark.parametrize("way", ["device", "fixed graph"])
def test_memory_goes_with_the_graph_and_a_step_ends_it(workers: Any, way: str) -> None:
    workers(2).run(memory_and_old_graphs, way)


@slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limits", ALL_LIMITS)
def test_every_use(workers: Any, limits: str, way: str) -> None:
    kinds = [("fp32", False, False), ("bf16", False, True), ("fp32", True, False)]
    check(workers, [(use, limits, way, *kind, 3) for use in USES for kind in kinds])


@slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_other_stages(workers: Any, stage: int) -> None:
    check(workers, [(use, "default", "device", "fp32", False, False, stage) for use in USES])


class Asks(nn.Module):
    """Has no parameters, and asks in its own forward for one that is gathered with it from then on."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.of = [of]
        self.register_forward_hook(lambda *_: None)  # without any, torch calls none that come during its forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with zero.GatheredParameters([self.of[0].weight], fwd_module=self):
            return x + self.of[0].weight.sum()


class ReadsAhead(nn.Module):
    """Reads a later module's weight, or holds what asks for it."""

    def __init__(self, of: nn.Linear, asks: bool) -> None:
        super().__init__()
        self.scale, self.of = nn.Parameter(torch.ones(WIDTH)), [of]
        self.inner = Asks(of) if asks else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return x @ self.of[0].weight if self.inner is None else self.inner(x)


class FirstReadsLast(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.first = ReadsAhead(self.last, asks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def users_after_a_read(asks: bool) -> None:
    with start(3, FirstReadsLast(asks), zero={"stage3_param_persistence_threshold": 0}) as engine:
        groups = {p._ds_member.group for p in engine.module.parameters()}
        for grad in (False, False, True):
            with torch.set_grad_enabled(grad):
                value = engine(rows(0, dist.get_rank())).square().mean()
            assert grad or {group.users for group in groups} == {0}
        engine.backward(value)
        assert {group.users for group in groups} == {0}
        assert engine._components.lifecycle.running == []
        engine.step()
        with raises(ZeroDivisionError):
            for group in groups:
                with group.whole():
                    raise ZeroDivisionError
        assert {group.state for group in groups} == {State.SHARDED}


@pytest.mark.parametrize("asks", [False, True])
def test_a_group_that_a_running_unit_reads_is_in_nobodys_use_afterwards(workers: Any, asks: bool) -> None:
    workers(2).run(users_after_a_read, asks)
