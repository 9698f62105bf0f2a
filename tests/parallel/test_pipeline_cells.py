"""Stages together with one thing at a time, and three kinds of parallelism by JSON alone, equal the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.pipeline_cells import adapted, alone, frozen, rebuilt, recomputed, refused, solid, tiered
from tests.parallel.pipeline_runs import INTERLEAVED, within

HOST = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "tier"),
    [
        (3, {"offload_optimizer": HOST, "offload_param": HOST}),
        *(pytest.param(stage, {"offload_optimizer": HOST}, marks=pytest.mark.slow) for stage in (1, 2, 3)),
    ],
)
def test_state_may_rest_on_the_host(workers: Any, stage: int, tier: Any) -> None:
    for found in workers(2).run(tiered, stage, tier, timeout=60):
        within(found)


@pytest.mark.slow
def test_state_may_rest_on_a_disk(workers: Any, tmp_path: Path) -> None:
    there = {"device": "nvme", "nvme_path": str(tmp_path)}
    for found in workers(2).run(tiered, 3, {"offload_optimizer": there, "offload_param": there}, timeout=60):
        within(found)


@pytest.mark.parametrize(
    ("stage", "only"),
    [(1, None), *(pytest.param(z, o, marks=pytest.mark.slow) for z in (0, 2, 3) for o in (None, [0]))],
)
def test_adapters_are_trained_in_stages(workers: Any, stage: int, only: list[int] | None) -> None:
    for found in workers(2).run(adapted, stage, only, timeout=60):
        within(found)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("prefix", ["transformer.h.3", "transformer.w", "transformer.h"])
def test_a_part_may_be_frozen(workers: Any, stage: int, prefix: str) -> None:
    for found in workers(2).run(frozen, stage, prefix, timeout=60):
        within(found)


@pytest.mark.parametrize(
    ("how", "stage"),
    [("json", 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("json", 1), ("model", 3)))],
)
def test_blocks_may_be_computed_again(workers: Any, how: str, stage: int) -> None:
    for found, runs in workers(2).run(recomputed, how, stage, timeout=60):
        within(found)
        assert runs == 2 * 4 * 2, runs  # two blocks, four micro-batches, twice


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 1, 2])
def test_layers_in_a_row_may_be_computed_again(workers: Any, interval: int) -> None:
    for found, counts in workers(2).run(rebuilt, interval):
        within(found)
        assert set(counts) == {4 if interval == 0 else 8}, counts


@pytest.mark.slow
def test_a_stage_may_be_the_embedding_alone(workers: Any) -> None:
    for found in workers(2).run(alone):
        within(found)


TP = {"tensor_parallel": {"autotp_size": 2}}
HYBRID = {"zero": {"mics_shard_size": 2}}
SOLID = [
    *((stage, TP, {"pp": 2, "dp_shard": 2, "tp": 2}, 2) for stage in range(4)),
    (1, {**TP, **INTERLEAVED}, {"pp": 2, "dp_shard": 2, "tp": 2}, 2),
    (3, HYBRID, {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, 4),
    (3, {**TP, "zero": {"mics_shard_size": 1}}, {"pp": 2, "dp_replicate": 2, "tp": 2}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "json", "mesh", "replicas"), SOLID, ids=str)
def test_three_kinds_of_parallelism_by_json_alone(
    workers: Any, stage: int, json: Any, mesh: dict[str, int], replicas: int
) -> None:
    for found in workers(8).run(solid, stage, json, mesh, replicas, timeout=100):
        within(found, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_tied_vocabulary_may_be_cut_too(workers: Any, stage: int) -> None:
    json = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}
    for found in workers(4).run(solid, stage, json, {"pp": 2, "tp": 2}, 1, timeout=60):
        within(found, 2e-6)


def test_what_cannot_be_had_says_what_is_nearest(workers: Any) -> None:
    workers(4).run(refused, timeout=60)
