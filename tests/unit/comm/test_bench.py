"""`ds_bench`: every collective on two ranks, and the command with its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.bench import OPERATIONS, measure, parser
from deepspeed.comm.watchdog.comms_logger import Curve
from deepspeed.errors import ArgumentError
from tests.harness.pool import WorkerPool

Workers = Callable[[int], WorkerPool]


def measured(options: list[str]) -> dict[str, list[dict[str, float]]]:
    arguments = parser().parse_args([*options, "--trials", "3", "--warmups", "1", "--debug"])
    return {operation: measure(operation, arguments) for operation in OPERATIONS}


@pytest.mark.parametrize("options", [["--scan", "--maxsize", "12"], ["--maxsize", "14", "--dist", "torch"]], ids=str)
def test_every_collective_is_measured(workers: Workers, options: list[str]) -> None:
    curves = workers(2).run(measured, options)
    assert curves[0] == curves[1]  # of the slowest rank
    for operation, rows in curves[0].items():
        assert [row["bytes"] for row in rows] == ([1024, 2048, 4096] if "--scan" in options else [16384])
        assert all(row["seconds"] > 0 and row["busbw"] > 0 for row in rows)
        for row in rows:
            moved = 2 if operation == "all_reduce" else 1
            assert row["algbw"] == pytest.approx(moved * row["bytes"] / row["seconds"] / 1e9)


def refused(options: list[str]) -> str:
    try:
        measured(options)
    except ArgumentError as error:
        return str(error)
    return ""


def test_bad_arguments_are_refused(workers: Workers) -> None:
    for options, words in ((["--maxsize", "3"], "give at least 10"), (["--dtype", "real"], "is no dtype of torch")):
        assert all(words in said for said in workers(2).run(refused, options))


@pytest.mark.slow
def test_the_command_starts_its_ranks_and_writes_a_curve_that_the_logger_reads(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    command = [sys.executable, "-m", "deepspeed.comm.bench", "--all-reduce", "--scan", "--maxsize", "12"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [*command, "--trials", "3", "--output", str(file)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "---- all_reduce, 2 ranks, float32" in done.stdout and "BusBW (Gbps)" in done.stdout
    assert json.loads(file.read_text())["ranks"] == 2 and file.with_suffix(".png").stat().st_size > 5000
    curve = Curve.read(str(file))
    low, between, high = (curve.busbw("all_reduce", size) for size in (1024, 1500, 2048))
    assert min(low, high) <= between <= max(low, high) and curve.busbw("broadcast", 1024) == 0.0


def measured_with_less_room() -> list[float]:
    accelerator = get_accelerator()
    room = 2048 << 2 * comm.get_rank()
    with mock.patch.object(type(accelerator), "available_memory", lambda *_: room):
        arguments = parser().parse_args(["--scan", "--maxsize", "13", "--trials", "1", "--mem-factor", "1"])
        return [row["bytes"] for row in measure("all_reduce", arguments)]


def test_all_ranks_measure_what_the_smallest_has_room_for(workers: Workers) -> None:
    assert workers(2).run(measured_with_less_room) == [[1024, 2048]] * 2
