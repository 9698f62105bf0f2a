"""A model whose experts ranks divide, on the device: losses as on the CPU, and no report."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.emulated import runs
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()

STEPS = 3


def divided(stage: int, own_stream: bool) -> runs.Seen:
    import deepspeed
    from tests.parallel.test_experts import loss_of, settings, tokens, toy

    with runs.observed(own_stream) as seen:
        params = {"lr": 1e-2, "eps": 1e-4}
        config = settings(stage, 2, 2, clip=1.0, optimizer={"type": "AdamW", "params": params})
        model = toy("Mixtral")
        model.set_experts_implementation("eager")  # Transformers counts tokens by histc, which the device lacks
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for micro in range(2 * STEPS):
            loss = loss_of(engine, tokens(dist.get_rank(), micro).to(engine.device))
            engine.backward(loss)
            engine.step()
            seen.losses.append(float(loss))
        engine.destroy()
    return seen


CELLS = [
    pytest.param(ranks, stage, own, marks=() if (ranks, stage, own) == (2, 1, True) else pytest.mark.slow)
    for ranks in (2, 4)
    for stage in (0, 1, 2, 3)
    for own in (False, True)
]


@pytest.mark.parametrize(("ranks", "stage", "own_stream"), CELLS)
def test_experts_train_as_on_the_cpu(workers, emulated, ranks, stage, own_stream):
    theirs = workers(ranks).run(divided, stage, own_stream, timeout=LIMIT)
    ours = emulated(ranks).run(divided, stage, own_stream, timeout=LIMIT)
    assert [report for rank in ours for report in rank.reports] == []
    for rank, other in zip(ours, theirs, strict=True):
        assert max(abs(a - b) / abs(b) for a, b in zip(rank.losses, other.losses, strict=True)) <= 2e-6
