"""What is predicted that a rank holds of a device, beside the allocator's rule over a step of the emulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate import PREDICTED, PREDICTION, ends_of, predicted, recorded
from benchmarks.simulated_models import SHAPES
from deepspeed.simulator.allocator import replay_memory
from deepspeed.simulator.machine import Machine
from tests.emulated.needs import need_compiler

need_compiler()

_CARD, _CASES = "H100-80GB", [{"stage": 2, "recompute": False}, {"stage": 3, "recompute": True, "offload": "all-cpu"}]


def named(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def compare(folder: Path, case: dict[str, Any]) -> None:
    row = predicted(folder, case, _CARD)
    assert abs(row["gap"]) <= PREDICTION, row
    assert row["reserved"] >= row["allocated"] and row["predicted"]["transit"] > 0, row
    assert abs(sum(row["predicted"].values()) / row["allocated"] - 1 - row["gap"]) < 1e-9


def test_a_prediction_is_what_a_device_allocates(tmp_path: Path) -> None:
    made = {"model": "llama-90m", "maker": "package", "ranks": 8, "micro": 1, "length": 512}
    compare(tmp_path, {**made, "stage": 3, "recompute": True, "offload": "all-cpu"})


@pytest.mark.slow
@pytest.mark.parametrize("more", _CASES, ids=named)
def test_a_prediction_is_what_a_device_allocates_for_more_layers(tmp_path: Path, more: dict[str, Any]) -> None:
    compare(tmp_path, {"model": "llama-220m", "maker": "package", "ranks": 8, "micro": 1, "length": 512, **more})


@pytest.mark.slow
@pytest.mark.parametrize("case", PREDICTED, ids=named)
def test_the_table(tmp_path: Path, case: dict[str, Any]) -> None:
    compare(tmp_path, case)


@pytest.mark.slow
def test_fsdp2_holds_its_shards_and_what_is_gathered(tmp_path: Path) -> None:
    """Its first update, too, which makes the optimizer's state, and asks torch for the shapes of whole parameters."""
    case = {"model": "llama-220m", "maker": "fsdp2", "ranks": 64, "micro": 1, "length": 16, "recompute": True}
    made = recorded(tmp_path, **case, steps=2)
    (first, _), (second, _) = replay_memory(made, Machine.load(_CARD), ends_of(made)).by_step
    whole = 4 * SHAPES[case["model"]].parameters
    shards = 4 * whole / 64  # values, gradients, both moments
    assert first <= second and shards < second < shards + whole  # in 16 bits, with buffers of a unit's messages
