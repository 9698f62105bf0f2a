"""A model cut over ranks, on the device: losses as on the CPU, and no report."""

from __future__ import annotations

import pytest

from tests.emulated import runs
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()

STEPS = 3


def sliced(stage: int, own_stream: bool) -> runs.Seen:
    import deepspeed
    from tests.parallel.dense import momentum
    from tests.parallel.tensor_runs import batch_of, config_of, model_of

    with runs.observed(own_stream) as seen:
        model = model_of("Llama")
        config = config_of(stage, 2, accumulation=2, clip=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
        for step in range(2 * STEPS):
            batch = batch_of(model, step, engine.get_data_parallel_rank())
            loss = engine(**{name: part.to(engine.device) for name, part in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            seen.losses.append(float(loss))
        engine.destroy()
    return seen


CELLS = [
    pytest.param(ranks, stage, own, marks=() if (ranks, stage, own) == (2, 3, True) else pytest.mark.slow)
    for ranks in (2, 4)
    for stage in (0, 1, 3)
    for own in (False, True)
]


@pytest.mark.parametrize(("ranks", "stage", "own_stream"), CELLS)
def test_slices_train_as_on_the_cpu(workers, emulated, ranks, stage, own_stream):
    theirs = workers(ranks).run(sliced, stage, own_stream, timeout=LIMIT)
    ours = emulated(ranks).run(sliced, stage, own_stream, timeout=LIMIT)
    assert [report for rank in ours for report in rank.reports] == []
    for rank, other in zip(ours, theirs, strict=True):
        assert max(abs(a - b) / abs(b) for a, b in zip(rank.losses, other.losses, strict=True)) <= 2e-6
