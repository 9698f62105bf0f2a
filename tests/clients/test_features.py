"""Clients beside training: loading, generation, adapters, checkpoints, validation, moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients import feature_runs as runs


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_models_are_born_resized_and_generate(workers: Any, ranks: int, tmp_path: Path) -> None:
    workers(ranks).run(runs.born_resized_and_generating, str(tmp_path), timeout=180)


def test_only_adapters_are_trained_and_saved(workers: Any, tmp_path: Path) -> None:
    workers(2).run(runs.adapters_alone, str(tmp_path), timeout=180)


def test_adalora_sees_what_it_sees_in_plain_torch(workers: Any) -> None:
    workers(2).run(runs.importance_of_adapters, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_trainer_resumes_in_a_new_process(workers: Any, stage: int, tmp_path: Path) -> None:
    whole = workers(2).run(runs.trainer_steps, stage, str(tmp_path), False, timeout=240)
    workers(2).kill()
    again = workers(2).run(runs.trainer_steps, stage, str(tmp_path), True, timeout=240)
    assert again == whole


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_saves_and_loads(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(runs.accelerate_state, stage, str(tmp_path), timeout=180)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (3, False),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [(1, False), (2, False), (2, True), (3, True)]),
    ],
)
def test_lightning_in_all_its_modes(workers: Any, stage: int, offload: bool, tmp_path: Path) -> None:
    workers(2).run(runs.lightning_modes, stage, str(tmp_path), offload, timeout=240)


@pytest.mark.parametrize("run", [runs.module_moves, runs.born_with_written_children, runs.one_model_after_another])
def test_what_clients_take_for_granted(workers: Any, run: Any) -> None:
    workers(2).run(run, timeout=90)
