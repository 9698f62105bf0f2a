"""Models cut by one number in the JSON train as the dense ones do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.tensor_runs import trained


def close(windows: list[tuple[float, ...]]) -> None:
    worst = [max(column) for column in zip(*windows, strict=True)]
    assert worst[0] <= 2e-6 and max(worst[1:]) <= 5e-6, worst


CELLS = [
    pytest.param("Llama", 2, 2, 3, 2, 0.0, id="llama-dp2-tp2-zero3"),
    pytest.param("GPTNeoX", 1, 2, 1, 1, 0.5, id="neox-tp2-zero1"),
]


@pytest.mark.parametrize(("family", "dp", "tp", "stage", "accumulation", "clip"), CELLS)
def test_one_number_cuts_a_model(
    workers: Any, family: str, dp: int, tp: int, stage: int, accumulation: int, clip: float
) -> None:
    for windows in workers(dp * tp).run(trained, family, dp, tp, stage, accumulation, clip, 5, timeout=120):
        close(windows)
