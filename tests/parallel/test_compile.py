"""torch.compile at every stage: all ways to ask for it, graphs, breaks and bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.accelerator import get_accelerator
from tests.parallel import compiled
from tests.parallel.compiled import WAYS, run
from tests.parallel.tiny import raises, said, sgd, start

RANKS, WIDTH, BLOCKS = 2, 8, 10  # more blocks than a function may be compiled again (8)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.number = nn.LayerNorm(WIDTH), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(number) for number in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def ids(step: int, rank: int) -> torch.Tensor:
    return torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(call: Any, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = call(ids(step, rank))
    return loss


def settings(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero_optimization", {})}
    base = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    return {**base, **more}


FREEING = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def ways(stage: int, backend: str, more: dict[str, Any], which: list[str]) -> None:
    eager = run(Stack, loss_of, settings(stage, **more))
    for way in which:
        seen = run(Stack, loss_of, settings(stage, **more), way, backend)
        bar = 2e-2 if "bf16" in more else 1e-4
        assert seen.near(eager, bar) if backend == "inductor" else seen.same(eager), (stage, way)
        assert seen.graphs[1] == seen.graphs[-1] > 0, (stage, way, seen.graphs)
        assert seen.breaks == 0, (stage, way, seen.breaks)
        if way != "regions":
            assert seen.graphs[-1] == 1, (stage, way, seen.graphs)


@pytest.mark.parametrize("stage", [1, 3])
def test_every_way_leads_to_one_graph(workers: Any, stage: int) -> None:
    workers(RANKS).run(ways, stage, "eager", {}, WAYS, timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}, {"zero_optimization": FREEING}], ids=str)
def test_backends(workers: Any, stage: int, backend: str, more: dict[str, Any]) -> None:
    if stage < 3 and "zero_optimization" in more:
        pytest.skip("limits of stage 3")
    workers(RANKS).run(ways, stage, backend, more, ["engine"], timeout=300)


class Numbered(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.number)


def numbered() -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(Numbered(number) for number in range(BLOCKS))
    return model


def unlike() -> None:
    seen = run(numbered, loss_of, settings(3), "engine", "eager")
    assert seen.graphs == [BLOCKS] * compiled.STEPS and seen.breaks == 0, seen.graphs
    assert seen.same(run(numbered, loss_of, settings(3)))


def test_blocks_that_read_numbers_of_their_own_have_a_graph_each(workers: Any) -> None:
    workers(RANKS).run(unlike, timeout=90)


def late_binding() -> None:
    for stage in (0, 3):
        with compiled.counting("eager") as counter, start(stage, Stack(), sgd) as engine:
            engine.compile(backend=counter)
            first = loss_of(engine, 0, 0).item()
            other = copy.deepcopy(engine.module)
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            assert loss_of(other, 0, 0).item() == pytest.approx(torch.log(torch.tensor(16.0)).item())
            assert loss_of(engine, 0, 0).item() == first
            engine.load_module_state_dict(dict(other.state_dict()))
            assert loss_of(engine, 0, 0).item() == pytest.approx(torch.log(torch.tensor(16.0)).item())
            module = engine.module
        assert type(module.forward).__name__ == "method"  # as it was


def test_a_graph_never_computes_with_old_values(workers: Any) -> None:
    workers(RANKS).run(late_binding, timeout=90)


def messages() -> list[str]:
    get_accelerator().set_compile_backend("eager")  # inductor is slow to import
    with said() as lines, start(3, Stack(), sgd, compile={"deepcompile": True}) as engine:
        assert engine.is_compiled
        with raises(NotImplementedError, "schedule"):
            engine.compile(schedule=[1])
    get_accelerator().set_compile_backend("inductor")
    return lines


def test_what_is_not_compiled_as_a_whole_is_said(workers: Any) -> None:
    lines, _ = workers(RANKS).run(messages, timeout=90)
    assert [line for line in lines if "deepcompile" in line]
    assert [line for line in lines if f"{BLOCKS} Block, one by one, since stage 3" in line], lines


def nothing() -> None:
    with start(3, Stack(), sgd) as engine:
        loss_of(engine, 0, dist.get_rank())
        assert not engine.is_compiled and type(engine.module.blocks[0].forward).__name__ == "method"


def test_nothing_is_compiled_unless_asked(workers: Any) -> None:
    workers(RANKS).run(nothing, timeout=90)
