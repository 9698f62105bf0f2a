"""A model described as layers, its dense twin, and what is planted in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import nn

import deepspeed
from deepspeed.comm import get_rank
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import ArgumentError, DataError, DeepSpeedError, PipelineError
from deepspeed.pipe import LayerSpec, PipeDataParallelTopology, PipelineModule, ProcessTopology, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.dense import Dense, momentum
from tests.parallel.pipeline_runs import apart, config_of, engine_of, replica
from tests.parallel.tiny import raises

WORDS, WIDTH = 12, 8


class Mixed(nn.Module):
    """Takes and gives (hidden, mask, count): a tensor, one without gradient, and a number."""

    def __init__(self, width: int, fault: str = "") -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(width, width), fault

    def forward(self, inputs: Any) -> Any:
        hidden, mask, count = inputs
        if self.fault == "forward":
            raise ValueError("planted in forward")
        if self.fault == "slow":
            time.sleep(0.03)
        hidden = hidden + torch.tanh(self.linear(hidden)) * mask
        if self.fault == "backward":
            hidden.register_hook(fail)
        return hidden, mask, count + 1


def fail(_gradient: torch.Tensor) -> None:
    raise ValueError("planted in backward")


def embed(layer: nn.Module, inputs: torch.Tensor) -> Any:
    return layer(inputs), (inputs > 2).unsqueeze(-1), 0


def project(layer: Any, inputs: Any) -> torch.Tensor:
    return inputs[0] @ layer.weight.t()


def rows(fault: str = "", blocks: int = 4) -> list[Any]:
    """Layers of the model; the last block has the fault."""
    return [
        TiedLayerSpec("table", nn.Embedding, WORDS, WIDTH, forward_fn=embed),
        *(LayerSpec(Mixed, WIDTH, fault=fault if at == blocks - 1 else "") for at in range(blocks)),
        TiedLayerSpec("table", nn.Embedding, WORDS, WIDTH, forward_fn=project),
    ]


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.reshape(-1, WORDS), labels.reshape(-1))


class Whole(nn.Module):
    """The same layers on one process, with the same names."""

    def __init__(self) -> None:
        super().__init__()
        for at, spec in enumerate(rows()):
            if not isinstance(spec, TiedLayerSpec):
                self.add_module(str(at), spec.build())
            elif at == 0:
                self.tied_modules = nn.ModuleDict({spec.key: spec.build()})

    def forward(self, batch: Any) -> torch.Tensor:
        table = self.tied_modules["table"]
        value: Any = embed(table, batch[0])
        for at in range(1, 5):
            value = self.get_submodule(str(at))(value)
        return loss_fn(project(table, value), batch[1])


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, WORDS, (2, 5 + step % 2), generator=draw)
    return ids, ids.roll(1, 1)


def feed(first: int, count: int, rank: int) -> Iterator[Any]:
    return iter(batch_of(first + at, rank) for at in range(count))


def start(
    stage: int, pp: int, steps: int, fault: str = "", chunks: int = 1, settings: Any = None, **module: Any
) -> Any:
    torch.manual_seed(0)
    model = PipelineModule(rows(fault), num_stages=pp, loss_fn=loss_fn, num_chunks=chunks, **module)
    config = config_of(stage, pp, steps, **(settings or {}))
    return engine_of(model, config)


def described(stage: int, pp: int, steps: int, chunks: int, **module: Any) -> list[tuple[float, float]]:
    """Relative distances of losses and parameters."""
    torch.manual_seed(0)
    found = []
    with start(stage, pp, steps, chunks=chunks, **module) as engine:
        torch.manual_seed(0)
        rank, replicas = replica(current_mesh()), engine.dp_world_size
        dense = Dense(Whole(), momentum, replicas, steps)
        for window in range(2):
            theirs = dense.window(window * steps, lambda model, step, at: model(batch_of(step, at)))
            dense.step()
            ends = engine.is_first_stage() or engine.is_last_stage()
            ours = engine.train_batch(feed(window * steps, steps, rank) if ends else None)
            found.append((abs(float(ours) - sum(theirs) / steps), apart(engine, dense)))
    return found


def failed(fault: str, stage: int) -> tuple[str, str, float]:
    """The error of each rank, and when it came."""
    engine = start(stage, 2, 3, fault)
    begun = time.monotonic()
    try:
        engine.train_batch(feed(0, 3, 0))
    except DeepSpeedError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", 0.0


def refused() -> None:
    """Calls that a pipeline does not serve, and data that ends."""
    with start(1, 2, 3) as engine:
        for call in (engine, engine.forward, engine.backward, engine.step):
            with raises(PipelineError, "train_batch"):
                call(torch.zeros(()))
        with raises(ArgumentError, "iterator"):
            engine.train_batch([batch_of(0, 0)])
        with raises(DataError, "takes 3 micro-batches", "after 2"):
            engine.train_batch(feed(0, 2 if engine.is_last_stage() else 3, 0))
        engine.eval()
        with raises(PipelineError, "evaluation mode"):
            engine.train_batch(feed(0, 3, 0))
        engine.train()
        assert torch.isfinite(engine.train_batch(feed(0, 3, 0)))
        drawn: list[int] = []
        engine.set_batch_fn(lambda batch: drawn.append(1) or batch)
        engine.set_dataiterator(feed(0, 30, 0))
        engine.train_batch()
        assert len(drawn) == 3, "one micro-batch too many was taken"
        assert "1f1b: 2 stages, 3 micro-batches" in str(engine.schedule(3))


def timed() -> tuple[list[int], list[tuple[float, float]]]:
    """Layers dealt by measured time, of which one rank of three finds others slow; bounds, and distances from dense."""
    example = batch_of(0, 0)[0]
    specs, blocks = rows(), ["", "slow", "slow", ""] if get_rank() else ["slow", "", "", "slow"]
    specs[1:5] = [LayerSpec(Mixed, WIDTH, fault=fault) for fault in blocks]
    model = PipelineModule(specs, num_stages=3, partition_method="profile", example_input=example, loss_fn=loss_fn)
    return model.partitions(), described(1, 3, 3, 1, partition_method="profile", example_input=example)


def unmeasured() -> str:
    """What ranks raise of which one has a layer that cannot run when it is measured."""
    specs = rows()
    if get_rank() == 1:
        specs[1] = LayerSpec(Mixed, WIDTH + 1)
    given = batch_of(0, 0)[0]
    try:
        PipelineModule(specs, num_stages=2, partition_method="profile", example_input=given, loss_fn=loss_fn)
    except ArgumentError as error:
        return str(error)
    return "nothing"


def limited() -> list[int]:
    """Bounds of layers on ranks of which one may hold less than the other."""
    from deepspeed.pipe.partition_cost import LayerCost, agreed, deal_layers

    costs = [LayerCost(1.0, 0, 100)] * 4
    return deal_layers(*_split(agreed(lambda: costs, 300.0 if get_rank() else 400.0)))


def _split(found: tuple[Any, float | None]) -> tuple[Any, int, int, float | None]:
    return found[0], 2, 1, found[1]


def gridded() -> tuple[Any, ...]:
    """What scripts ask the grid of a topology, and of a unit made from it; on 4 ranks."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    grid = PipelineParallelGrid(topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    rank = get_rank()
    assert grid.get_global_rank() == rank and grid.get_stage_id() == rank // 2 and grid.get_data_parallel_id() == 0
    assert grid.stage_to_global(stage_id=1 - rank // 2) == (rank + 2) % 4
    assert grid.stage_to_global(0, model=1) == 1
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (rank, 4)
    assert torch.distributed.get_process_group_ranks(grid.get_slice_parallel_group())[0] == rank // 2 * 2
    with raises(ArgumentError, "pipe, data, model", "other"):
        PipelineParallelGrid(ProcessTopology(["pipe", "other"], [2, 2]))
    with raises(AttributeError, "get_nothing"):
        _ = grid.get_nothing
    torch.manual_seed(0)
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    model = PipelineModule(rows(), topology=topology, loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=momentum(model.parameters()),
        config=config_of(1, 2, 2),
        mpu=PipelineParallelGrid(topology),
    )
    with engine:
        loss = engine.train_batch(feed(0, 2, replica(current_mesh())))
        newest = PipelineParallelGrid()
        assert newest.topology().get_rank(pipe=1, data=1, model=0) == 3
        return float(loss), newest.get_data_parallel_rank(), newest.get_pipe_parallel_rank()


def looked_up(stage: int, precision: str, watched: bool) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """How often a large table's gradient came by rows; parameters with that, and with whole gradients."""
    from deepspeed.zero.gradients import reducer

    calls, add = [0], reducer.add_rows

    def counted(*args: Any) -> None:
        calls[0] += 1
        add(*args)

    made = []
    for few in (4, 10**9):
        with MonkeyPatch.context() as patch:
            patch.setattr(reducer, "add_rows", counted)
            patch.setattr(deepspeed.zero.gradients.sparse_rows, "_FEW", few)
            made.append(_with_a_large_table(stage, precision, watched))
    return calls[0], *made


def _with_a_large_table(stage: int, precision: str, watched: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Embedding(200, WIDTH, padding_idx=3), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)]
    model, seen = PipelineModule(layers, num_stages=2, loss_fn=loss_fn), []
    first = next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
    if first is not None and watched:
        first.weight.register_hook(lambda gradient: seen.append(gradient.layout))
    config = config_of(stage, 2, 3, **({} if precision == "fp32" else {precision: {"enabled": True}}))
    with engine_of(model, config) as engine:
        for window in range(2):
            engine.train_batch(feed(3 * window, 3, 0))
        assert first is None or first.sparse is False
        assert set(seen) <= {torch.strided}
        return [safe_get_full_fp32_param(param).clone() for param in engine.module.parameters()]
