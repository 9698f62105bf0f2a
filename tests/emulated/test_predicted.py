"""What is predicted that a rank holds of a device, beside the allocator's rule over a step of the emulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate import PREDICTED, PREDICTION, predicted
from tests.emulated.needs import need_compiler

need_compiler()

_CARD, _FAST = "H100-80GB", [{"stage": 2, "recompute": False}, {"stage": 3, "recompute": True, "offload": "all-cpu"}]


def named(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def compare(folder: Path, case: dict[str, Any]) -> None:
    row = predicted(folder, case, _CARD)
    assert abs(row["gap"]) <= PREDICTION, row
    assert row["reserved"] >= row["allocated"] and row["predicted"]["transit"] > 0, row
    assert abs(sum(row["predicted"].values()) / row["allocated"] - 1 - row["gap"]) < 1e-9


@pytest.mark.parametrize("more", _FAST, ids=named)
def test_a_prediction_is_what_a_device_allocates(tmp_path: Path, more: dict[str, Any]) -> None:
    compare(tmp_path, {"model": "llama-220m", "maker": "package", "ranks": 8, "micro": 1, "length": 512, **more})


@pytest.mark.slow
@pytest.mark.parametrize("case", PREDICTED, ids=named)
def test_the_table(tmp_path: Path, case: dict[str, Any]) -> None:
    compare(tmp_path, case)
