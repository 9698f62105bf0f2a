"""Parity on the device: every cell of a pairwise cover, and some more, have the CPU's losses and no report."""

from __future__ import annotations

import pytest

from tests.emulated import runs
from tests.emulated.cells import Cell, others, pairwise
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()

CELLS = pairwise()
BARS = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 2e-3}


def bar_of(cell: Cell) -> float:
    """Largest relative difference of a loss to the CPU's run."""
    return 2e-6 if cell.dtype == "fp32" and cell.ranks > 1 else BARS[cell.dtype]


def expect_parity(cell: Cell, workers, emulated) -> None:
    theirs = workers(cell.ranks).run(runs.train, cell, timeout=LIMIT)
    ours = emulated(cell.ranks).run(runs.train, cell, timeout=LIMIT)
    reports = [report for rank in ours for report in rank.reports]
    assert reports == [], "\n".join(reports[:3])
    gap = max(
        abs(a - b) / abs(b)
        for rank, other in zip(ours, theirs, strict=True)
        for a, b in zip(rank.losses, other.losses, strict=True)
    )
    assert gap <= bar_of(cell), f"{gap:.3g} > {bar_of(cell):g}"  # a NaN is not


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_are_the_cpus(workers, emulated, cell):
    expect_parity(cell, workers, emulated)


@pytest.mark.slow
@pytest.mark.parametrize("cell", others(60), ids=str)
def test_losses_are_the_cpus_in_other_cells(workers, emulated, cell):
    expect_parity(cell, workers, emulated)


def test_the_cover_is_one():
    """Every two values that can meet do, in as many cells as `make test` has time for."""
    assert len(CELLS) <= 30
    stages = {(cell.stage, cell.tier) for cell in CELLS}
    assert {(3, tier) for tier in ("device", "cpu", "nvme", "cpu-cpu", "device-cpu", "nvme-nvme")} <= stages
    assert {(stage, cell.dtype) for stage in range(4) for cell in CELLS} == {(c.stage, c.dtype) for c in CELLS}
