"""How gradients of a window are weighed and sent, at every stage on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.tiny import STAGES, expect_close, loss_of, masters, reference, rows, start, tiny

RANKS = 2


def loop_in_low_precision() -> None:
    """Weights differ from rank to rank: one rank's last batch is a third of the other's."""
    batches = [[rows(0, 0, 6), rows(1, 0, 2)], [rows(0, 1, 6), rows(1, 1, 6)]]
    for accumulation in (1, 2):
        twin = tiny().bfloat16()
        masters_ = {name: p.detach().float() for name, p in tiny().named_parameters()}
        for low in range(0, 2, accumulation):
            window = [batch for rank in batches for batch in rank[low : low + accumulation]]
            total = {name: torch.zeros_like(value) for name, value in masters_.items()}
            for batch in window:
                gradients = torch.autograd.grad(loss_of(twin, batch.bfloat16()), list(twin.parameters()))
                for name, gradient in zip(total, gradients, strict=True):
                    total[name] += gradient.float() * len(batch) / sum(map(len, window))
            for (name, parameter), gradient in zip(twin.named_parameters(), total.values(), strict=True):
                masters_[name] -= 0.1 * gradient
                parameter.data.copy_(masters_[name])
        for stage in STAGES:
            with start(stage, accumulation=accumulation, precision="bf16") as engine:
                for x in engine.loop(batches[dist.get_rank()]):
                    engine.backward(loss_of(engine, x))
                    engine.step()
                expect_close(masters(engine), masters_, at=(stage, accumulation))


def test_loops_weigh_real_samples_in_low_precision(workers: Any) -> None:
    workers(RANKS).run(loop_in_low_precision)


def coalesced() -> None:
    for stage in STAGES:
        with start(stage) as engine:
            with engine.coalesce_grad_reduction():
                engine.backward(loss_of(engine, rows(0, dist.get_rank())))
                engine.backward(loss_of(engine, rows(1, dist.get_rank())))
            engine.step()
            expect_close(masters(engine), reference([[0, 1]], RANKS, accumulation=1).parameters(), at=stage)


def test_coalesce_grad_reduction(workers: Any) -> None:
    workers(RANKS).run(coalesced)
