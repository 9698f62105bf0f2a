"""The table of launches: 32 blocks on two ranks, beside FSDP2 and DDP."""

from __future__ import annotations

import pytest

from tests.emulated.launches import DEPTH, WIDTH, cost
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()

ROWS = [("package", 0), ("package", 1), ("package", 2), ("ddp", 0), ("package", 3), ("fsdp2", 3)]


PARAMETERS = DEPTH * (2 * WIDTH + WIDTH * 4 * WIDTH + 4 * WIDTH + 4 * WIDTH * WIDTH + WIDTH)


def wire_bytes(stage: int) -> int:
    """What one of two ranks sends: a sum is a reduction to owners and a gather; stage 3 gathers twice.

    The block that is last in forward is first in backward, and stays.
    """
    half = PARAMETERS * 4 // 2
    return 2 * half if stage < 3 else 3 * half - half // DEPTH


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_launches_no_more_than_ddp_and_fsdp2(emulated, clip):
    found = {row: emulated(2).run(cost, *row, clip, timeout=3 * LIMIT)[0] for row in ROWS}
    print(f"\n{'step':12} {'operators':>9} {'collectives':>11} {'host waits':>10} {'wire bytes':>10}")
    operators = {}
    for (maker, stage), seen in found.items():
        counters = seen["counters"]
        collectives, sent = counters.get("launch.nccl", 0), counters.get("bytes.wire", 0)
        operators[maker, stage] = counters["launch"] - collectives
        name = f"{maker} {stage}" if maker == "package" else maker
        print(f"{name:12} {operators[maker, stage]:9} {collectives:11} {len(seen['waits']):10} {sent:10}")
        if maker == "package":
            assert seen["reports"] == [] and len(seen["waits"]) <= 1
            assert sent == wire_bytes(stage)
    assert all(operators["package", stage] <= operators["ddp", 0] for stage in (0, 1, 2))
    assert operators["package", 3] <= operators["fsdp2", 3]
