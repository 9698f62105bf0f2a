"""The detector detects: twelve faults planted into the package, each reported with the lines of both sides."""

from __future__ import annotations

import pytest
import torch

from tests.emulated import runs
from tests.emulated.mutations import MUTATIONS, Mutation, planted
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()


def run_planted(mutation: Mutation) -> list[str]:
    """The reports of a run with a fault; the run itself may fail."""
    with runs.observed() as seen, planted(mutation):
        engine = runs.engine_of(mutation.cell)
        try:
            for step in range(2):
                for micro in range(mutation.cell.accumulation):
                    runs.micro_step(engine, step, micro)
        except RuntimeError as error:
            seen.extra = str(error)
        torch.cuda.synchronize() if mutation.found != "MISMATCH" else None
        engine.destroy()
    return seen.reports


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_planted_fault_is_reported_with_both_lines(emulated, mutation):
    pool = emulated(mutation.cell.ranks)
    reports = [report for rank in pool.run(run_planted, mutation, timeout=LIMIT) for report in rank]
    wanted = [report for report in reports if report.startswith(mutation.found)]
    assert wanted, reports
    sides = [report.split("[")[1:] for report in wanted]
    one, other = mutation.lines
    assert any(
        (any(one in a for a in side) and any(other in b for b in side[1:]))
        or (any(other in a for a in side) and any(one in b for b in side[1:]))
        for side in sides
        if len(side) >= 2
    ), wanted
