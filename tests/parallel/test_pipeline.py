"""Unedited models in stages equal the dense model: schedules, ZeRO stages, tied weights, precisions, meshes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.pipeline_runs import loaded, reshaped, saved, skipped, trained, twice, uncounted, within

BAR = 1e-6
SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
}
# pp, dp, ZeRO stage, schedule, accumulation
FAST = [(2, 1, 0, "1f1b", 4), (2, 1, 1, "gpipe", 5), (2, 1, 2, "interleaved", 4), (2, 1, 3, "1f1b", 5)]
ALL = [
    (pp, dp, stage, schedule, accumulation)
    for pp, dp, stage, schedule, accumulation in itertools.product((2, 4), (1, 2), range(4), SCHEDULES, (4, 5))
    if pp * dp <= 4 and not (schedule == "interleaved" and accumulation % pp)
]


@pytest.mark.parametrize(("pp", "dp", "stage", "schedule", "accumulation"), FAST)
def test_stages_equal_the_dense_model(
    workers: Any, pp: int, dp: int, stage: int, schedule: str, accumulation: int
) -> None:
    settings = {"pipeline": SCHEDULES[schedule]}
    for found in workers(pp * dp).run(trained, "GPTNeo", 4, pp, dp, stage, accumulation, settings, 2, 0.5):
        within(found)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp", "stage", "schedule", "accumulation"), ALL)
def test_the_whole_table_equals_the_dense_model(
    workers: Any, pp: int, dp: int, stage: int, schedule: str, accumulation: int
) -> None:
    layers, settings = pp * (2 if schedule == "interleaved" else 1), {"pipeline": SCHEDULES[schedule]}
    for family in ("GPTNeo", "Llama"):
        for found in workers(pp * dp).run(trained, family, layers, pp, dp, stage, accumulation, settings, timeout=60):
            within(found)


SLICES = {"tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        (3, "1f1b"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in itertools.product(range(4), SCHEDULES)
            if one != (3, "1f1b")
        ),
    ],
)
def test_stages_of_slices_equal_the_dense_model(workers: Any, stage: int, schedule: str) -> None:
    settings = {**SLICES, "pipeline": SCHEDULES[schedule]}
    for found in workers(4).run(trained, "GPTNeo", 4, 2, 1, stage, 4, settings, timeout=60):
        within(found)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("dp", "settings"), [(2, {}), (1, SLICES)], ids=["dp2", "tp2"])
def test_eight_ranks_in_four_stages_equal_the_dense_model(
    workers: Any, dp: int, settings: Any, stage: int, schedule: str
) -> None:
    given = {**settings, "pipeline": SCHEDULES[schedule]}
    for found in workers(8).run(trained, "GPTNeo", 8, 4, dp, stage, 4, given, timeout=120):
        within(found)


@pytest.mark.parametrize(
    ("precision", "stage", "schedule"),
    [
        ("fp16", 1, "1f1b"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in itertools.product(("fp32", "bf16", "fp16"), range(4), SCHEDULES)
            if one != ("fp16", 1, "1f1b")
        ),
    ],
)
def test_stages_give_the_bits_of_the_whole_model(workers: Any, precision: str, stage: int, schedule: str) -> None:
    for ours, theirs, same in workers(2).run(twice, precision, stage, SCHEDULES[schedule], timeout=60):
        *windows, scale = ours
        assert same and scale == theirs[-1] == (16.0 if precision == "fp16" else 1.0)  # halved, then doubled
        for (loss, skips), (other, theirs_too) in zip(windows, theirs[:-1], strict=True):
            assert skips == theirs_too and (loss is other is None or abs(loss - other) <= BAR * other), (ours, theirs)
        assert [skips for _, skips in windows] == ([0, 1, 1, 1] if precision == "fp16" else [0] * 4)


def test_a_count_that_interleaved_cannot_have_names_the_next(workers: Any) -> None:
    workers(2).run(uncounted)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_an_overflow_on_one_stage_skips_the_step_on_all(workers: Any, precision: str) -> None:
    for steps, same, scale, losses in workers(2).run(skipped, precision):
        assert steps == 1 and same and scale == (16.0 if precision == "fp16" else 1.0)
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 3), pytest.param("interleaved", 1, marks=pytest.mark.slow)])
def test_lengths_may_change_and_evaluation_is_that_of_the_whole_model(workers: Any, schedule: str, stage: int) -> None:
    for rank, (evaluated, mean, shapes, (sent, headers)) in enumerate(workers(2).run(reshaped, schedule, stage)):
        assert evaluated <= BAR and mean <= BAR
        assert shapes == ([(2, 9, 64)] * 2 if rank == 1 else None)
        assert headers <= 19
        if schedule == "1f1b":  # lengths 9, 10, 11, 9, evaluated and trained, and two of 9: 2 samples, width 32, fp32
            hidden = 2 * 32 * 4
            assert sent == (2 * 39 + 18) * hidden if rank == 0 else sent == 39 * hidden


def mesh_at_random(draw: random.Random) -> dict[str, Any]:
    """A mesh of 1, 2 or 4 ranks."""
    pp, tp, dp = draw.choice([(2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1), (1, 2, 2)])
    stage = draw.randrange(4)
    return {"pp": pp, "tp": tp, "dp": dp, "stage": stage, "tier": draw.choice(["", "cpu"]) if stage else ""}


def pairs(count: int) -> list[Any]:
    draw = random.Random(7)
    found = []
    while len(found) < count:
        one, other = mesh_at_random(draw), mesh_at_random(draw)
        if one["pp"] > 1 or other["pp"] > 1:
            found.append(pytest.param(one, other, marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(
    ("source", "target"), [({"pp": 2, "stage": 1}, {"pp": 1, "stage": 3, "dp": 2}), *pairs(20)], ids=str
)
def test_a_checkpoint_goes_to_any_mesh(workers: Any, tmp_path: Path, source: Any, target: Any) -> None:
    def run(function: Any, mesh: Any) -> Any:
        ranks = mesh["pp"] * mesh.get("tp", 1) * mesh.get("dp", 1)
        return workers(ranks).run(function, str(tmp_path), mesh, timeout=60)

    run(saved, source)
    same, there = (run(loaded, mesh) for mesh in (source, target))
    whole: dict[str, torch.Tensor] = {}
    for found, _ in same:
        whole |= found
    for found, loss in there:
        assert all(torch.equal(value, whole[name]) for name, value in found.items())
        replicas = source.get("dp", 1) == target.get("dp", 1)  # else they are fed with other samples
        assert not replicas or abs(loss - same[0][1]) <= 2 * BAR
    assert set().union(*(found for found, _ in there)) == set(whole)
