"""Unedited models in stages equal the dense model: schedules, ZeRO stages, tied weights, uneven micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.pipeline_runs import trained

BAR = 1e-6


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_stages_of_an_unedited_gpt_neo_equal_the_dense_model(workers: Any, stage: int) -> None:
    for found in workers(2).run(trained, "GPTNeo", 2, 2, 1, stage, 4):
        assert all(gap <= BAR for row in found for gap in row), found
