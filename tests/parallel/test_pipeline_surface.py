"""Loops over windows, numbers beside the loss, flush and no_sync of an engine of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.dense import momentum
from tests.parallel.pipeline_runs import INTERLEAVED, config_of, deep, within
from tests.parallel.pipeline_surface import (
    along,
    apart_from_others,
    asked,
    evaluated,
    handed_over,
    in_a_row,
    looped,
    named,
    told,
)

BAR = 1e-6


@pytest.mark.parametrize(
    ("stage", "lengths", "policy", "settings"),
    [
        (1, [10], "drop", None),
        (3, [5], "drop", INTERLEAVED),  # the last window is of one micro-batch, which is no round of two stages
        pytest.param(2, [5, 9], "pad", None, marks=pytest.mark.slow),
        pytest.param(3, [5, 9], "cycle", None, marks=pytest.mark.slow),
        pytest.param(0, [5, 9], "drop", INTERLEAVED, marks=pytest.mark.slow),
        pytest.param(1, [5, 9], "drop", {"pipeline": {"schedule": "zero_bubble"}}, marks=pytest.mark.slow),
    ],
)
def test_a_loop_over_windows_trains_as_the_dense_model_does(
    workers: Any, stage: int, lengths: list[int], policy: str, settings: Any
) -> None:
    for found in workers(2 * len(lengths)).run(looped, stage, lengths, policy, settings, timeout=60):
        within(found)


def test_a_loop_evaluates_by_samples(workers: Any) -> None:
    for found in workers(2).run(evaluated):
        within(found)


@pytest.mark.parametrize("policy", ["drop", pytest.param("cycle", marks=pytest.mark.slow)])
def test_stages_without_data_go_along_in_a_loop(workers: Any, policy: str) -> None:
    for found in workers(3).run(in_a_row, 3, policy):
        within(found)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_numbers_of_the_last_stage_are_on_every_rank(workers: Any, tmp_path: Path, ranks: int) -> None:
    found = workers(ranks).run(told, str(tmp_path))
    assert all(row[:2] == found[0][:2] for row in found)
    trained, _, written = found[0]
    assert written == [pytest.approx(trained["size"])]


def test_a_number_in_the_model_s_output_is_one_of_them(workers: Any) -> None:
    found = workers(2).run(named)
    assert all(gap <= BAR and set(told) == {"largest"} for gap, told in found) and found[0][1] == found[1][1]


def test_calls_around_a_window(workers: Any) -> None:
    workers(2).run(asked)


def test_a_stage_without_data_does_as_the_others_do(workers: Any) -> None:
    workers(3).run(along, timeout=60)


def test_a_window_that_one_rank_cannot_start_starts_on_none(workers: Any) -> None:
    workers(2).run(apart_from_others, timeout=60)


def test_an_optimizer_with_state_on_one_rank_ends_all(workers: Any) -> None:
    workers(2).run(handed_over, timeout=60)


def staged_by_argument() -> str:
    import deepspeed

    model = deep("GPTNeo", 2)
    config = config_of(1, 2)
    del config["pipeline"]
    optimizer = momentum(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mesh_param={"pp": 2})[0]
    with engine:
        return f"{type(engine).__name__} {engine.num_stages}"


def test_the_number_of_stages_may_be_an_argument(workers: Any) -> None:
    assert workers(2).run(staged_by_argument) == ["PipelineEngine 2"] * 2
