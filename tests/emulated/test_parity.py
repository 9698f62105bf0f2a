"""Parity on the device: every cell of a pairwise cover, and some more, have the CPU's losses and no report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.emulated import runs
from tests.emulated.cells import VALUES, Cell, others, pairwise
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


@pytest.mark.drawn(4)  # four ranks: test_across_hosts.py, and hybrid ones in test_seen_wrong.py
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.slow if cell.ranks == 4 else ()) for cell in CELLS],
    ids=str,
)
def test_losses_are_the_cpus(workers, emulated, cell):
    expect_parity(cell, workers, emulated)


@pytest.mark.slow
@pytest.mark.parametrize("cell", others(60), ids=str)
def test_losses_are_the_cpus_in_other_cells(workers, emulated, cell):
    expect_parity(cell, workers, emulated)


TIERS = {1: VALUES["tier"][:3], 2: VALUES["tier"][:3], 3: VALUES["tier"]}


def expect_the_same_on_every_tier(emulated, cell: Cell, tiers: tuple[str, ...]) -> None:
    found = {tier: emulated(cell.ranks).run(runs.train, replace(cell, tier=tier), timeout=LIMIT) for tier in tiers}
    losses = {tier: [rank.losses for rank in ranks] for tier, ranks in found.items()}
    assert [report for ranks in found.values() for rank in ranks for report in rank.reports] == []
    assert all(each == losses["device"] for each in losses.values()), losses


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_losses_in_low_precision_are_the_same_on_every_tier(emulated, dtype):
    expect_the_same_on_every_tier(emulated, Cell(stage=3, ranks=2, dtype=dtype), ("device", "cpu", "nvme-nvme"))


@pytest.mark.slow
@pytest.mark.parametrize("small_buckets", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_in_low_precision_are_the_same_on_all_tiers(emulated, stage, dtype, small_buckets):
    cell = Cell(stage=stage, ranks=2, dtype=dtype, accumulation=2, small_buckets=small_buckets)
    expect_the_same_on_every_tier(emulated, cell, TIERS[stage])


def test_the_cover_is_one():
    """Every two values that can meet do, in few cells."""
    assert len(CELLS) <= 30
    stages = {(cell.stage, cell.tier) for cell in CELLS}
    assert {(3, tier) for tier in ("device", "cpu", "nvme", "cpu-cpu", "device-cpu", "nvme-nvme")} <= stages
    assert {(stage, cell.dtype) for stage in range(4) for cell in CELLS} == {(c.stage, c.dtype) for c in CELLS}
