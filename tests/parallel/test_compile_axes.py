"""torch.compile beside tensor, sequence, expert and pipeline parallelism: graphs, breaks and bits on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.collectives import torch_api
from deepspeed.comm.collectives.graph_operators import register_operators
from deepspeed.comm.collectives.same_error import run_collectively
from deepspeed.comm.collectives.torch_api import ClientCollective
from deepspeed.comm.process_groups.mesh import current_mesh
from tests.parallel import compiled
from tests.parallel.compiled import WAYS, closing_inductor, run, run_bare
from tests.parallel.test_compile import settings
from tests.parallel.test_compile_models import loss_function, make

RANKS, WIDTH, HEADS, BLOCKS, VOCABULARY = 2, 8, 2, 10, 16
SLICES = {"tensor_parallel": {"autotp_size": 2}}
VOCABULARY_SLICES = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}


class Attends(nn.Module):
    """Three matrices read one tensor: their gradients with respect to it are summed over ranks once."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attends, self.norm = Attends(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attends(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class Attentive(nn.Module):
    example_input_array = torch.arange(10).view(2, 5)

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def loss_of(call: Any, step: int, _: int) -> torch.Tensor:
    loss: torch.Tensor = call(torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(step)))
    return loss


def sliced(stage: int, blocks: int, ways: list[str], backends: list[str]) -> None:
    eager = run(lambda: Attentive(blocks), loss_of, settings(stage, **SLICES))
    for way in ways:
        for backend in backends:
            seen = run(lambda: Attentive(blocks), loss_of, settings(stage, **SLICES), way, backend)
            assert seen.breaks == 0 and seen.graphs == [1] * compiled.STEPS, (way, backend, seen.breaks, seen.graphs)
            assert seen.same(eager) if backend == "eager" else seen.near(eager), (way, backend)


@pytest.mark.parametrize(("stage", "blocks"), [(1, 1), (3, BLOCKS)])
def test_sums_of_sliced_layers_are_operators_of_one_graph(workers: Any, stage: int, blocks: int) -> None:
    workers(RANKS).run(sliced, stage, blocks, ["engine"], ["eager"], timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_way_leads_to_one_graph_of_slices(workers: Any, stage: int) -> None:
    ways = [way for way in WAYS if way != "regions"]
    workers(RANKS).run(sliced, stage, 3, ways, ["eager", "aot_eager"], timeout=300)


def told() -> None:
    labels: list[str] = []

    def seen(label: str, *args: Any, **kwargs: Any) -> ClientCollective:
        labels.append(label)
        return ClientCollective(label, *args, **kwargs)

    with mock.patch.object(torch_api, "ClientCollective", seen):
        run(lambda: Attentive(1), loss_of, settings(1, **SLICES))
        eager = labels.copy()
        labels.clear()
        run(lambda: Attentive(1), loss_of, settings(1, **SLICES), "engine", "eager")
    assert labels == eager
    for name in ("sum of blocks.0.down", "gradient of what blocks.0.attends.q reads"):
        assert sum(label.startswith(name) for label in labels) >= compiled.STEPS, name


def test_every_call_of_a_graph_is_seen_under_its_name(workers: Any) -> None:
    workers(RANKS).run(told, timeout=90)


def test_collectives_are_kept_out_of_cuda_graphs() -> None:
    register_operators()
    for name in ("summed", "gathered", "exchanged"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.deepspeed, name).default.tags


def one_fails() -> list[str]:
    import deepspeed

    model = Attentive(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with compiled.counting("eager") as counter:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(1, **SLICES))
        engine.compile(backend=counter)
        loss_of(engine.module, 0, 0)

        def step() -> None:
            if dist.get_rank():
                raise ValueError("a bad batch")
            loss_of(engine.module, 1, 0)

        outcome = run_collectively(current_mesh().axis("tp"), step)
        engine.destroy()
    return outcome.texts


def test_an_error_on_one_rank_ends_the_graph_of_the_others(workers: Any) -> None:
    for texts in workers(RANKS).run(one_fails, timeout=90):
        assert not texts[0] and "a bad batch" in texts[1], texts


def alike(name: str) -> Any:
    """The loss of a model of Transformers on a batch that is the same on all ranks."""
    loss = loss_function(name)
    return lambda call, step, _: loss(call, step, 0)


def model_cell(name: str, axis: dict[str, Any], stage: int, backend: str) -> None:
    build, loss = make(name), alike(name)
    bare = run_bare(build, loss, backend)
    eager = run(build, loss, settings(stage, **axis))
    seen = run(build, loss, settings(stage, **axis), "engine", backend)
    assert seen.breaks <= bare.breaks, (seen.breaks, bare.breaks)
    assert 0 < seen.graphs[1] == seen.graphs[-1], seen.graphs
    assert seen.near(eager), (seen.losses, eager.losses)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "t5"])
def test_models_in_slices(workers: Any, name: str, stage: int, backend: str) -> None:
    workers(RANKS).run(model_cell, name, SLICES, stage, backend, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_of_a_model_with_a_split_vocabulary(workers: Any, stage: int) -> None:
    workers(RANKS).run(model_cell, "llama", VOCABULARY_SLICES, stage, "eager", timeout=300)


def index_outside(backend: str) -> str:
    import deepspeed

    torch._dynamo.reset()
    model = make("llama")()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(3, **VOCABULARY_SLICES))
    engine.compile(backend=backend)
    with pytest.raises(RuntimeError) as raised:
        engine(input_ids=torch.full((1, 4), 10_000))
    engine.destroy()
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_split_table_refuses_an_index_outside(workers: Any, backend: str) -> None:
    arguments = (inductor_cell, index_outside) if backend == "inductor" else (index_outside, backend)
    for text in workers(RANKS).run(*arguments, timeout=300):
        assert "an index outside of the 64 rows" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # OPT is refused over split sequences
def test_models_with_a_split_sequence(workers: Any, name: str, stage: int, backend: str) -> None:
    workers(RANKS).run(model_cell, name, {"sequence_parallel_size": 2}, stage, backend, timeout=300)


def expert_cell(stage: int, backend: str) -> None:
    """A break at the experts of each block, nowhere else: numbers of rows depend on the router's choices."""
    build, loss, axis = make("mixtral"), loss_function("mixtral"), {"expert_parallel": {"size": 2}}
    layers = len([module for module in build().modules() if type(module).__name__ == "MixtralExperts"])
    eager = run(build, loss, settings(stage, **axis))
    seen = run(build, loss, settings(stage, **axis), "engine", backend)
    assert layers > 0
    assert seen.breaks == 2 * layers, (seen.breaks, layers)  # of a block, and of the module in it that has the experts
    assert 0 < seen.graphs[1] == seen.graphs[-1], seen.graphs
    assert seen.same(eager) if backend == "eager" else seen.near(eager), (seen.losses, eager.losses)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_around_divided_experts(workers: Any, stage: int, backend: str) -> None:
    workers(RANKS).run(expert_cell, stage, backend, timeout=300)


def window_of(engine: Any, _: Any, step: int) -> float:
    """The loss of a window of two micro-batches of a pipeline."""
    batches = []
    for micro_batch in range(2):
        ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(100 * step + micro_batch))
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return float(engine.train_batch(iter(batches)))


def pipeline_cell(stage: int, schedule: str, backend: str) -> None:
    build = make("llama")
    pipeline = {"stages": 2, "schedule": schedule}
    config = settings(stage, pipeline=pipeline, gradient_accumulation_steps=2)
    eager = run(build, None, config, advance=window_of)
    seen = run(build, None, config, "engine", backend, window_of)
    kinds = 2 if stage == 3 and dist.get_rank() else 1  # the last norm is a unit of stage 3
    assert seen.breaks == 0 and seen.graphs == [kinds] * compiled.STEPS, (seen.breaks, seen.graphs)
    assert seen.same(eager) if backend == "eager" else seen.near(eager), (seen.losses, eager.losses)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("stage", "schedule"), [(0, "1f1b"), (1, "1f1b"), (3, "1f1b"), (1, "gpipe"), (1, "zero_bubble")]
)
def test_blocks_of_pipeline_stages(workers: Any, stage: int, schedule: str, backend: str) -> None:
    workers(RANKS).run(pipeline_cell, stage, schedule, backend, timeout=300)


def inductor_cell(cell: Callable[..., Any], *arguments: Any) -> Any:
    with closing_inductor():
        return cell(*arguments, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("llama", SLICES),
        ("gpt2", SLICES),
        ("qwen2", {"sequence_parallel_size": 2}),
        ("llama", VOCABULARY_SLICES),
    ],
    ids=["llama-slices", "gpt2-slices", "qwen2-sequence", "llama-vocabulary"],
)
def test_inductor(workers: Any, name: str, axis: dict[str, Any], stage: int) -> None:
    workers(RANKS).run(inductor_cell, model_cell, name, axis, stage, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_inductor_around_divided_experts(workers: Any, stage: int) -> None:
    workers(RANKS).run(inductor_cell, expert_cell, stage, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "schedule"), [(1, "1f1b"), (3, "1f1b"), (1, "zero_bubble")])
def test_inductor_in_pipeline_stages(workers: Any, stage: int, schedule: str) -> None:
    workers(RANKS).run(inductor_cell, pipeline_cell, stage, schedule, timeout=900)
