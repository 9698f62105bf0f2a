"""Gradients by rows on the device: the losses of the CPU and of whole gradients, and no race."""

from __future__ import annotations

import pytest
import torch

from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import Seen, observed
from tests.parallel.test_sparse_gradients import model_of, rows_sent, train
from tests.parallel.tiny import start

need_compiler()


def trained(stage: int, precision: str, accumulation: int, key: bool, offload: bool) -> Seen:
    """Losses and weights of a run; `extra`: the weights of the table."""
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offload else {}
    settings = {"precision": precision, "accumulation": accumulation, "clip": 0.01, "zero": zero}
    with observed() as seen, start(stage, model_of(), sparse_gradients=key, **settings) as engine:
        assert len(rows_sent(engine)) == 2 * key
        seen.losses = train(engine, range(3 * accumulation))
        seen.extra = engine.module.table.weight.detach().float().cpu()
    return seen


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("ranks", "stage", "precision", "accumulation", "offload"),
    [
        (2, 0, "bf16", 1, False),
        (3, 0, "fp32", 2, False),
        (3, 1, "bf16", 2, False),
        (2, 2, "fp16", 1, True),
        (3, 2, "fp32", 2, False),
    ],
)
def test_losses_are_those_of_whole_gradients_and_of_the_cpu(
    workers, emulated, ranks: int, stage: int, precision: str, accumulation: int, offload: bool
) -> None:
    how = stage, precision, accumulation
    rows = emulated(ranks).run(trained, *how, True, offload, timeout=LIMIT)
    assert [report for rank in rows for report in rank.reports] == []
    whole = emulated(ranks).run(trained, *how, False, offload, timeout=LIMIT)
    host = workers(ranks).run(trained, *how, True, offload, timeout=LIMIT)
    for ours, other, cpu in zip(rows, whole, host, strict=True):
        assert ours.losses == pytest.approx(other.losses, rel=1e-6 if precision == "fp32" else 1e-3)
        assert ours.losses == pytest.approx(cpu.losses, rel=1e-5 if precision == "fp32" else 1e-2)
        assert torch.allclose(ours.extra, other.extra, atol=1e-6 if precision == "fp32" else 1e-2)
