"""Counted items, writing, what stages hold, and how long stage 3 keeps what it gathers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.pipeline_runs import INTERLEAVED, counted, measured, profiled, within, written


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_that_are_sums_over_items_equal_the_dense_model(workers: Any, stage: int) -> None:
    for found in workers(2).run(counted, stage):
        within(found)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_items_count_once_where_a_stage_has_several_parts(workers: Any, stage: int) -> None:
    for found in workers(2).run(counted, stage, INTERLEAVED, 4):
        within(found)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_stages_write_is_what_the_model_writes(workers: Any, stage: int) -> None:
    assert workers(2).run(written, stage) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("stage", "schedule", "micros", "pp", "ranks"),
    [
        (1, "1f1b", 4, 2, 2),
        pytest.param(2, "gpipe", 4, 2, 2, marks=pytest.mark.slow),
        *(pytest.param(z, s, 4, 2, 4, marks=pytest.mark.slow) for z in (0, 1, 2, 3) for s in ("1f1b", "gpipe")),
    ],
)
def test_stages_hold_what_the_plan_and_the_schedule_say(
    workers: Any, stage: int, schedule: str, micros: int, pp: int, ranks: int
) -> None:
    for row in workers(ranks).run(measured, stage, schedule, micros, pp, "micro_batch", timeout=60):
        whole, shards, found = row["elements"] * 4, row["shards"], row["bytes"]
        wanted = {
            "parameters": whole / (shards if stage == 3 else 1),
            "gradients": whole / (shards if stage == 3 else 1),  # stage 2 reduces once a window, as stage 1
            "optimizer": 2 * whole / (shards if stage else 1),
        }
        assert all(abs(found[kind] - size) <= 0.03 * size for kind, size in wanted.items()), (row, wanted)
        assert abs(row["most"] - row["peak"] * row["one"]) <= 0.05 * row["most"], row


@pytest.mark.slow
def test_ranks_that_measure_other_times_cut_alike(workers: Any) -> None:
    (first, one), (second, two) = workers(2).run(profiled)
    assert (first, second) == ("transformer.h 0-2", "transformer.h 3"), (first, second)  # 0.3 s, 0, 0, 0.9 s on average
    assert max(one, two) <= 1e-6
