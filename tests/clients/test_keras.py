"""Keras 3 models on the torch backend: as one process, as torch's DDP where batches and seeds are each rank's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.clients import keras_runs as runs

FAST = {("transformer", 3), ("normalised", 3)}


def cells(names: Iterable[str]) -> list[Any]:
    every = [(name, stage) for name in names for stage in (0, 1, 2, 3)]
    return [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in every]


@pytest.mark.parametrize(("name", "stage"), cells(runs.MODELS))
def test_losses_are_those_of_one_process(workers: Any, name: str, stage: int) -> None:
    workers(2).run(runs.as_alone, name, stage, timeout=120)


@pytest.mark.parametrize(("name", "stage"), cells(runs.PER_RANK))
def test_statistics_and_seeds_are_those_under_ddp(workers: Any, name: str, stage: int) -> None:
    workers(2).run(runs.as_ddp, name, stage, timeout=120)


@pytest.mark.slow
def test_stage_3_gathers_layer_by_layer(workers: Any) -> None:
    workers(2).run(runs.layer_by_layer, "transformer", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["normalised", "transformer"])
def test_saving_to_keras_after_training(workers: Any, tmp_path: Path, name: str, stage: int) -> None:
    workers(2).run(runs.saved, name, stage, str(tmp_path), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", runs.PER_RANK)
def test_each_rank_goes_on_with_its_own_statistics_and_seeds(
    workers: Any, tmp_path: Path, name: str, stage: int
) -> None:
    workers(2).run(runs.resumed, name, stage, str(tmp_path), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_fit_with_a_train_step_of_the_engine(workers: Any, stage: int) -> None:
    workers(2).run(runs.fitted, stage, timeout=120)
