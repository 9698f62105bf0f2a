"""Encoded messages on the device: the losses of the CPU, no race, no wait that has no reason."""

from __future__ import annotations

import pytest

from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()

CELLS = [
    Cell(stage=0, ranks=2, small_buckets=True, wire="int8"),
    Cell(stage=2, ranks=2, small_buckets=True, wire="int4", dtype="bf16", accumulation=2),
    Cell(stage=3, ranks=2, small_buckets=True, wire="int8"),
    *(
        pytest.param(cell, marks=pytest.mark.slow)
        for cell in (
            Cell(stage=1, ranks=2, small_buckets=True, wire="int8", dtype="fp16"),
            Cell(stage=2, ranks=4, small_buckets=True, wire="int4", tier="cpu"),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int4", tier="cpu-cpu", accumulation=2),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hybrid=True),
            Cell(stage=3, ranks=2, small_buckets=True, wire="int8", own_stream=True, checkpointing=True, init=True),
            Cell(stage=2, ranks=2, small_buckets=True, wire="bf16", own_stream=True),
        )
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_are_those_of_the_cpu(workers, emulated, cell: Cell) -> None:
    found = emulated(cell.ranks).run(runs.train, cell, timeout=LIMIT)
    assert [report for rank in found for report in rank.reports] == []
    theirs = [rank.losses for rank in workers(cell.ranks).run(runs.train, cell, timeout=LIMIT)]
    for ours, others in zip([rank.losses for rank in found], theirs, strict=True):
        # A value next to the middle of two codes may be rounded to the other one.
        assert ours == pytest.approx(others, rel=1e-4 if cell.dtype == "fp32" else 1e-3)
