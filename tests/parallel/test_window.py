"""The accumulation window without an engine: a schedule that runs forwards ahead of backwards holds one of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.build import build
from deepspeed.zero.gradients.accumulation import Way
from deepspeed.zero.parameters.parallel_groups import axes_of, find_mesh
from tests.parallel.tiny import STAGES, expect_close, loss_of, reference, rows, sgd, tiny
from tests.parity.configs import config

RANKS = 2


def scheduled(stage: int) -> None:
    """Three micro-batches, two of them forward before the first backward; two windows."""
    model, device = tiny(), torch.device("cpu")
    json = config(stage, model, accumulation=3)
    axes = axes_of(find_mesh(DeepSpeedConfig.for_init(json), None, None, device))
    settings = DeepSpeedConfig(json, world=RANKS)
    parts = build(model, sgd(model.parameters()), settings, axes, device)
    assert parts.optimizer is not None
    window, updates = parts.window, 0
    for first in (0, 3):
        waiting = [loss_of(model, rows(first + ahead, dist.get_rank())) for ahead in range(2)]
        for micro in range(3):
            with window.backward_pass(Way.MEAN):
                waiting.pop(0).backward()
            if micro == 0:
                waiting.append(loss_of(model, rows(first + 2, dist.get_rank())))
            if window.end_micro_batch():
                parts.optimizer.step()
                updates += 1
    assert (updates, window.seen) == (2, 0)
    twin = reference([[0, 1, 2], [3, 4, 5]], RANKS)
    from deepspeed.utils import safe_get_full_fp32_param

    ours = {name: safe_get_full_fp32_param(param).clone() for name, param in model.named_parameters()}  # type: ignore[union-attr]
    expect_close(ours, twin.parameters(), at=stage)
    parts.optimizer.destroy()
    if parts.lifecycle is not None:
        parts.lifecycle.settle()
        parts.lifecycle.detach()
    dist.barrier()
    for group in parts.groups:
        group.dissolve()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_holds_a_window(workers: Any, stage: int) -> None:
    workers(RANKS).run(scheduled, stage)
