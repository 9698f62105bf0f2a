"""A model that is born sharded, or without values, in stages on the device: losses as on the CPU, and no report."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.emulated import runs
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()


def staged(how: str, stage: int) -> runs.Seen:
    import deepspeed
    from tests.parallel.dense import momentum
    from tests.parallel.pipeline_births import born
    from tests.parallel.pipeline_runs import batches, config_of

    with runs.observed(False) as seen:
        config = config_of(stage, 2, 4, 1.0)
        model = born(how, "GPTNeo", 4, config)
        engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
        rows = list(batches(model, 0, 10, 0))
        seen.losses += [float(engine.train_batch(window)) for window in engine.loop(rows)]
        engine.destroy()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("how", "stage"), [("init", 3), ("init", 1), ("ranks", 3), ("meta", 3)])
def test_stages_of_a_born_model_train_as_on_the_cpu(workers: Any, emulated: Any, how: str, stage: int) -> None:
    ours = emulated(2).run(staged, how, stage, timeout=LIMIT)
    assert [report for rank in ours for report in rank.reports] == []
    if how == "meta":  # values are drawn on the device, which draws others
        assert all(len(rank.losses) == 3 and math.isfinite(sum(rank.losses)) for rank in ours)
        return
    theirs = workers(2).run(staged, how, stage, timeout=LIMIT)
    for rank, other in zip(ours, theirs, strict=True):
        assert max(abs(a - b) / abs(b) for a, b in zip(rank.losses, other.losses, strict=True)) <= 2e-6
