"""Same numbers: each technique × stages × ranks × tiers × precisions × accumulation beside one plain process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.parallel.compression_cells import Cell, pairwise, product, run_cells
from tests.parallel.planted import per_rank_scales, per_rank_top_k, revival_by_momentum, stale_mask


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_two_settings_together(workers: Any, ranks: int) -> None:
    cells = [cell for cell in pairwise() if cell.ranks == ranks]
    told = workers(ranks).run(run_cells, cells, timeout=120)
    assert not any(told), "\n".join(itertools.chain(*told))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_whole_product(workers: Any, ranks: int, precision: str, accumulation: int) -> None:
    chosen = (ranks, precision, accumulation)
    cells: list[Cell] = [c for c in product() if (c.ranks, c.precision, c.accumulation) == chosen]
    told = workers(ranks).run(run_cells, cells, timeout=600)
    assert not any(told), "\n".join(itertools.chain(*told))


def run_planted(fault: Any, cell: Cell) -> list[str]:
    with fault():
        return run_cells([cell])


PLANTED = [
    (stale_mask, Cell("weights", 2, "device", 2, "fp32", 1, "sgd")),
    (per_rank_top_k, Cell("weights", 3, "device", 2, "fp32", 1, "sgd")),
    (revival_by_momentum, Cell("heads", 3, "device", 2, "fp32", 1, "adamw")),
    (per_rank_scales, Cell("fake 8", 0, "device", 2, "fp32", 1, "sgd")),
    (stale_mask, Cell("ramp", 3, "cpu", 2, "fp32", 1, "adamw")),
    (per_rank_top_k, Cell("global", 1, "cpu", 2, "bf16", 3, "adamw")),
    (revival_by_momentum, Cell("weights", 1, "device", 2, "fp32", 1, "sgd")),
    (per_rank_scales, Cell("fake 3", 3, "cpu", 2, "fp32", 3, "sgd")),
]


@pytest.mark.parametrize(
    ("fault", "cell"),
    [pytest.param(*one, marks=pytest.mark.slow if at > 3 else ()) for at, one in enumerate(PLANTED)],
    ids=[f"{fault.__name__}-{cell.technique}" for fault, cell in PLANTED],
)
def test_planted_faults_miss_the_bars(workers: Any, fault: Any, cell: Cell) -> None:
    assert not any(workers(cell.ranks).run(run_cells, [cell], timeout=60)), "the cell fails without the fault"
    assert any(workers(cell.ranks).run(run_planted, fault, cell, timeout=60))
