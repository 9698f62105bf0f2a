"""Bytes on the wire for each step: what the comms logger and the recorder count is what the formula says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.watchdog.comms_logger import comms_logger
from deepspeed.foundation.spans import FLIGHT, recorder
from tests.harness.pool import WorkerPool
from tests.parallel.tiny import STAGES, start

Workers = Callable[[int], WorkerPool]
WIDTH, DEPTH = 8, 4
ELEMENTS = WIDTH * WIDTH * DEPTH  # divides among 2 and 4 ranks: no padding


class Even(nn.Module):
    """Blocks of which every rank owns as much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def counted(stage: int, accumulation: int, limits: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes a rank received in the third step by operation, as the comms logger and as the recorder have them."""
    torch.manual_seed(0)
    zero: dict[str, Any] = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 0}
    keys = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    zero |= dict.fromkeys(keys, 0 if limits else 10**9)
    logger = {"enabled": True}
    with start(stage, Even(), accumulation=accumulation, sharded=False, zero=zero, comms_logger=logger) as engine:
        for step in range(3):
            if step == 2:
                comms_logger.reset()
                recorder.start()
            for micro in range(accumulation):
                x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro + dist.get_rank()))
                engine.backward(engine(x).square().mean())
                engine.step()
        recorder.stop()
        comms_logger.enabled = False
        logged, recorded = Counter[str](), Counter[str]()
        for row in comms_logger.summary():
            logged[row["op"]] += row["received_bytes"]
        for span in recorder.take()[0]:
            if span.category == FLIGHT:
                recorded[span.label.partition(" ")[0]] += span.nbytes
        comms_logger.reset()
    return dict(logged), dict(recorded)


def wanted(stage: int, accumulation: int, limits: bool, ranks: int) -> dict[str, int]:
    """(n - 1) / n of the fp32 values, as often as the stage moves them."""
    part = 4 * ELEMENTS * (ranks - 1) // ranks
    if stage == 0:  # reduced to owners, and shared; once in a window
        return {"reduce": 2 * part}
    if stage == 1:
        return {"reduce": part, "publish": part}
    if stage == 2:  # as they arrive
        return {"reduce": accumulation * part, "publish": part}
    gathers = 2 * part if limits else part  # in each pass: again for backward where nothing may stay
    return {"reduce": accumulation * part, "gather": accumulation * gathers}


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_a_step_are_those_of_the_formula(workers: Workers, stage: int) -> None:
    for limits in (False, True)[: 1 + (stage == 3)]:
        for accumulation in (1, 2):
            for logged, recorded in workers(2).run(counted, stage, accumulation, limits):
                assert logged == recorded
                found = {name: count for name, count in logged.items() if name != "agreement"}
                assert found == wanted(stage, accumulation, limits, 2), (accumulation, limits)
                assert 0 < logged["agreement"] < 2000


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_on_four_ranks(workers: Workers, stage: int) -> None:
    for logged, recorded in workers(4).run(counted, stage, 2, False, timeout=60):
        assert logged == recorded
        found = {name: count for name, count in logged.items() if name != "agreement"}
        assert found == wanted(stage, 2, False, 4)
