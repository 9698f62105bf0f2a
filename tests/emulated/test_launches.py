"""The table of launches: 32 blocks on two ranks, beside FSDP2 and DDP."""

from __future__ import annotations

import pytest

from tests.emulated.launches import DEPTH, WIDTH, alone, cost
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


BF16 = {"bf16": {"enabled": True}}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
CLIP = 1e-3


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_waits_only_for_the_check_of_its_gradients(emulated, stage):
    """The norm is read when somebody asks for it; clipping by it gives the same bits as by a number."""
    world = emulated(1)
    checked, unchecked = (world.run(alone, stage, CLIP, 1, keys, timeout=LIMIT)[0] for keys in (BF16, UNCHECKED))
    assert len(checked["waits"]) == 1 and unchecked["waits"] == []
    assert checked["reports"] == unchecked["reports"] == []
    assert checked["values"] == unchecked["values"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_rank_collects_gradients_without_a_transfer_buffer(emulated, accumulation):
    """The bits are those of rounds in bf16, which `communication_data_type` asks for, and there are fewer launches."""
    world, rounds = emulated(1), BF16 | {"communication_data_type": "bf16"}
    direct, sent = (world.run(alone, 3, CLIP, accumulation, keys, timeout=LIMIT)[0] for keys in (BF16, rounds))
    assert direct["values"] == sent["values"]
    assert (direct["buffers"] == 0) == (accumulation == 1) and sent["buffers"] > 0
    assert direct["counters"]["launch"] < sent["counters"]["launch"]
