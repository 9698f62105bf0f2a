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


@pytest.mark.parametrize(("name", "stage"), [cell for cell in cells(runs.MODELS) if cell.values[1] == 3])
def test_losses_of_a_model_born_sharded(workers: Any, name: str, stage: int) -> None:
    workers(2).run(runs.born_as_alone, name, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", runs.PER_RANK)
def test_statistics_and_seeds_of_a_model_born_sharded(workers: Any, name: str) -> None:
    workers(2).run(runs.born_as_ddp, name, timeout=120)


# a torch module inside keeps computing in float32 under Keras' mixed policy alone, which is what it is compared with
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [name for name in runs.MODELS | runs.PER_RANK if name not in ("wrapped", "dropped")])
def test_a_bf16_block_with_the_mixed_policy(workers: Any, name: str, stage: int) -> None:
    workers(2).run(runs.in_bf16, name, stage, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "recurrent"])
def test_a_bf16_model_born_sharded(workers: Any, name: str) -> None:
    workers(2).run(runs.in_bf16, name, 3, True, timeout=120)


def test_a_bf16_block_over_float32_layers_is_refused(workers: Any) -> None:
    workers(2).run(runs.refused_in_bf16, timeout=120)


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
