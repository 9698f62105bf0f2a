"""Pipelines of numpy batches feed `engine.loop`: plain, of tf.data, of grain."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.clients import pipeline_runs as runs

PACKAGES = {"numpy": "numpy", "tf.data": "tensorflow", "grain": "grain"}
CELLS = [
    pytest.param(name, stage, marks=() if (name, stage) == ("numpy", 3) else pytest.mark.slow)
    for name in PACKAGES
    for stage in (0, 3)
]


@pytest.mark.parametrize(("pipeline", "stage"), CELLS)
def test_shares_of_unequal_length_count_by_their_samples(workers: Any, pipeline: str, stage: int) -> None:
    if importlib.util.find_spec(PACKAGES[pipeline]) is None:
        pytest.skip(f"{PACKAGES[pipeline]} is not installed; it is no dependency, not of the tests either")
    workers(2).run(runs.fed, pipeline, stage, timeout=180)
