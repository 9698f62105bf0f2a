"""Memory predicted by one process where ranks share matrices, then measured on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepspeed import comm
from deepspeed.planner import measure_memory, predict_memory
from deepspeed.planner.memory import simulate
from deepspeed.planner.train_program import Program
from tests.harness.pool import WorkerPool
from tests.parallel.memory_models import MODELS
from tests.parallel.test_predicted_memory import config_of

Workers = Callable[[int], WorkerPool]
ROWS = 4

# model, ranks, stage, dtype, what makes the mesh, and what else the cell varies
CELLS: list[tuple[str, int, int, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", 2, 0, "fp32", {"tensor_parallel": {"autotp_size": 2}}, {}),
    ("gpt2", 2, 1, "bf16", {"tensor_parallel": {"autotp_size": 2}}, {"accumulation": 2, "recompute": True}),
    ("llama", 4, 2, "bf16", {"tensor_parallel": {"autotp_size": 2}}, {}),
    ("llama", 2, 1, "fp32", {"sequence_parallel_size": 2}, {}),
    ("gpt2", 4, 0, "fp32", {"tensor_parallel": {"autotp_size": 4}}, {}),
    ("gpt2", 2, 0, "bf16", {"sequence_parallel_size": 2}, {"recompute": True, "accumulation": 2}),
    ("llama", 4, 3, "bf16", {"sequence_parallel_size": 2}, {}),
    ("gpt2", 4, 3, "fp32", {"zero_optimization": {"mics_shard_size": 2}}, {}),
]
FAST = 1


def measured(name: str, config: dict[str, Any]) -> Any:
    make, batch = MODELS[name]
    return measure_memory(make, config, batch=batch(ROWS), updates=2)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if at < FAST else [pytest.mark.slow]) for at, cell in enumerate(CELLS)],
    ids=lambda cell: "-".join([*map(str, cell[:4]), *cell[4], *cell[5]]),
)
def test_what_is_predicted_of_a_mesh_is_what_lives(workers: Workers, cell: tuple[Any, ...]) -> None:
    name, ranks, stage, dtype, mesh, varied = cell
    config, (make, batch) = config_of(stage, dtype, varied, ""), MODELS[name]
    config |= {
        key: {**config.get(key, {}), **value} if isinstance(value, dict) else value for key, value in mesh.items()
    }
    if comm.is_initialized():  # an earlier test's: a prediction makes a world of its own
        comm.destroy_process_group()
    ends = (0, ranks - 1) if cell is not CELLS[0] else (ranks - 1,)  # a prediction takes as long as the run
    predicted = [predict_memory(make, config, ranks, batch=batch(ROWS), rank=rank, updates=2) for rank in ends]
    real = workers(ranks).run(measured, name, config, timeout=200)
    for told, found in zip(predicted, (real[rank] for rank in ends), strict=True):
        print(f"{told.peak / found.peak - 1:+.3%} of {found.peak}, {told.at_peak} for {found.at_peak}")
        print(f"birth {told.birth / found.birth - 1:+.3%} of {found.birth}, at rest {told.at_rest} for {found.at_rest}")
        assert told.peak == pytest.approx(found.peak, rel=0.02)
        assert told.birth == pytest.approx(found.birth, rel=0.02)
        for mine, theirs in ((told.at_peak, found.at_peak), (told.at_rest, found.at_rest)):
            for category, count in theirs.items():
                if count > sum(theirs.values()) / 10:
                    assert mine.get(category, 0) == pytest.approx(count, rel=0.05), category


@pytest.mark.slow
def test_nothing_stays_of_an_update_where_ranks_share_matrices() -> None:
    make, batch = MODELS["gpt2"]
    config = config_of(1, "bf16", {"recompute": True}, "") | {"tensor_parallel": {"autotp_size": 2}}
    if comm.is_initialized():
        comm.destroy_process_group()
    counts = [simulate(Program(make, config, batch(ROWS), updates=updates), 0, 2) for updates in (2, 4)]
    assert counts[0].at_rest == counts[1].at_rest
    assert counts[0].peak == counts[1].peak
