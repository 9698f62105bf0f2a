"""Memory of the stages of a pipeline, predicted by one process, one stage at a time, then measured on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed import comm
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.planner import measure_memory, predict_memory
from tests.harness.pool import WorkerPool
from tests.parallel.memory_models import MODELS
from tests.parallel.test_predicted_memory import config_of

Workers = Callable[[int], WorkerPool]
ROWS, WIDTH, TOKENS = 4, 64, 48


class Feed(nn.Module):
    """Hands on what it makes, and a mask that its successors branch on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = given
        if not bool(mask.all()):
            raise ValueError("the mask has not come along")
        return x + self.down(torch.relu(self.up(x))), mask


def _loss(made: tuple[torch.Tensor, torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    return (made[0] - wanted).square().mean()


def row(method: str = "parameters") -> PipelineModule:
    example = (torch.zeros(1, TOKENS, WIDTH), torch.ones(1, TOKENS, dtype=torch.bool))
    ends = [TiedLayerSpec("ends", Feed) for _ in range(2)]  # on both stages
    specs = [ends[0], *(LayerSpec(Feed) for _ in range(3)), ends[1]]
    return PipelineModule(specs, num_stages=2, loss_fn=_loss, partition_method=method, example_input=example)


def row_batch(rows: int) -> Any:
    return (torch.zeros(rows, TOKENS, WIDTH), torch.ones(rows, TOKENS, dtype=torch.bool)), torch.zeros(
        rows, TOKENS, WIDTH
    )


STAGED = {**MODELS, "row": (row, row_batch)}
# model, ranks, stage, dtype, the JSON's block, and what else the cell varies
CELLS: list[tuple[str, int, int, str, dict[str, Any], dict[str, Any]]] = [
    ("row", 2, 1, "fp32", {"stages": 2}, {"accumulation": 4}),
    ("llama", 2, 0, "fp32", {"stages": 2}, {"accumulation": 4}),
    ("gpt2", 2, 1, "bf16", {"stages": 2}, {"accumulation": 4}),
    ("llama", 4, 1, "bf16", {"stages": 2}, {"accumulation": 4}),
    ("llama", 3, 0, "fp32", {"stages": 3}, {"accumulation": 6}),
    ("gpt2", 2, 1, "bf16", {"stages": 2}, {"accumulation": 4, "recompute": True}),  # one block alone on a stage
    ("bert", 2, 0, "fp32", {"stages": 2}, {"accumulation": 4}),  # embeddings that follow a tied one
    ("bert", 2, 1, "bf16", {"stages": 2}, {"accumulation": 4}),
    ("row", 2, 0, "fp32", {"stages": 2, "schedule": "zero_bubble"}, {"accumulation": 4}),
    ("row", 2, 0, "fp32", {"stages": 2, "schedule": "gpipe"}, {"accumulation": 3}),
]
FAST = 1


def measured(name: str, config: dict[str, Any]) -> Any:
    make, batch = STAGED[name]
    return measure_memory(make, config, batch=batch(ROWS), updates=2)


def alone() -> None:
    """No world of an earlier test is left: a prediction makes one of its own."""
    if comm.is_initialized():
        comm.destroy_process_group()


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if at < FAST else [pytest.mark.slow]) for at, cell in enumerate(CELLS)],
    ids=lambda cell: "-".join([*map(str, cell[:4]), *map(str, cell[4].values()), *cell[5]]),
)
def test_what_is_predicted_of_a_stage_is_what_lives(workers: Workers, cell: tuple[Any, ...]) -> None:
    name, ranks, stage, dtype, pipeline, varied = cell
    config, (make, batch) = config_of(stage, dtype, varied, "") | {"pipeline": pipeline}, STAGED[name]
    alone()
    predicted = [predict_memory(make, config, ranks, batch=batch(ROWS), rank=rank, updates=2) for rank in range(ranks)]
    for rank, (told, found) in enumerate(
        zip(predicted, workers(ranks).run(measured, name, config, timeout=200), strict=True)
    ):
        print(
            f"rank {rank}: {told.peak / found.peak - 1:+.3%} (late {told.most / found.peak - 1:+.3%}) of {found.peak}"
        )
        print(f"at peak {told.at_peak} for {found.at_peak}, at rest {told.at_rest} for {found.at_rest}")
        # How many messages are under way depends on how far stages are apart: between both predictions.
        assert told.peak * 0.98 <= found.peak <= told.most * 1.02
        if pipeline == {"stages": 2}:
            still = [memory.peak - memory.at_peak.get("transit", 0) for memory in (told, found)]
            assert still[0] == pytest.approx(still[1], rel=0.02)
        assert told.birth == pytest.approx(found.birth, rel=0.02)
        for mine, theirs in ((told.at_peak, found.at_peak), (told.at_rest, found.at_rest)):
            for category, count in theirs.items():
                if count > sum(theirs.values()) / 10 and category != "transit":
                    assert mine.get(category, 0) == pytest.approx(count, rel=0.05), category


@pytest.mark.slow  # what is cut by what: tests/unit/pipe
def test_a_cut_by_time_is_one_by_operations_where_nothing_takes_any() -> None:
    """Five equal layers: the same cut each time, and as even as can be."""
    config, layer = config_of(0, "fp32", {"accumulation": 2}, ""), sum(p.numel() for p in Feed().parameters())
    alone()
    make, batch = partial(row, "profile"), row_batch(1)
    held = [predict_memory(make, config, 2, batch=batch, rank=rank, updates=1).held for rank in (0, 1)]
    assert sorted(held) == [2 * layer, 3 * layer]
