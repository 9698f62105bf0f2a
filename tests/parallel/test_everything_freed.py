"""Hard models, client losses, parity and the table of functions once more, with every limit of stage 3 at 0."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.common import compare
from tests.clients.test_losses import CLIENTS
from tests.clients.test_losses import FAST as FAST_CLIENTS
from tests.parallel.test_hard_models import RANKS, misses, run_case
from tests.parallel.test_sharded_parameters import find_calls, try_calls
from tests.parity.cases import CASES
from tests.parity.cells import Cell, run_cell
from tests.parity.configs import everything_freed
from tests.parity.function_arguments import KINDS
from tests.parity.test_parity import faults_found, inspects, representatives
from tests.parity.worlds import ReferenceWorld

FAST_CASES = ("external_parameter", "two_losses_on_one_graph", "checkpoint_not_reentrant")
CELLS = [cell for cell in representatives() if cell.stage == 3]
LOSSES = sorted(cell for cell in FAST_CLIENTS if cell[1] == 3)


def check_case(workers: Any, name: str, precision: str) -> None:
    world = ReferenceWorld(RANKS, precision)
    CASES[name](world)
    outcomes = workers(RANKS).run(everything_freed, run_case, name, 3, precision, timeout=120)
    for rank, notes in enumerate(outcomes):
        assert not misses(notes, world.notes[rank], precision), f"rank {rank}"


@pytest.mark.parametrize("name", FAST_CASES)
def test_some_hard_models(workers: Any, name: str) -> None:
    check_case(workers, name, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_hard_models(workers: Any, name: str, precision: str) -> None:
    check_case(workers, name, precision)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_parity(workers: Any, cell: Cell) -> None:
    records = workers(cell.ranks).run(everything_freed, run_cell, cell, 20, inspects(cell), timeout=120)
    assert not faults_found(cell, records)


@pytest.mark.slow
@pytest.mark.parametrize(("client", "stage", "precision", "ranks"), LOSSES)
def test_client_losses(workers: Any, client: str, stage: int, precision: str, ranks: int) -> None:
    workers(ranks).run(everything_freed, compare, CLIENTS[client], stage, precision, timeout=300)


@pytest.mark.slow
def test_table_of_functions(workers: Any) -> None:
    (calls,) = workers(1).run(find_calls, timeout=900)
    for kind, known in zip(KINDS, calls, strict=True):
        for rank, found in enumerate(workers(2).run(everything_freed, try_calls, known, kind, timeout=600)):
            assert not found, f"rank {rank}, {kind}:\n" + "\n".join(found)
