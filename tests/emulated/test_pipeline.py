"""A model in stages, on the device: losses as on the CPU, and no report."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.emulated import runs
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()


def staged(pp: int, stage: int, settings: Any, own_stream: bool, lengths: bool, late: bool) -> runs.Seen:
    import deepspeed
    from deepspeed.comm import collectives, get_rank
    from deepspeed.comm.mesh import current_mesh
    from tests.parallel.dense import momentum
    from tests.parallel.pipeline_runs import batches, config_of, deep, replica

    draw = random.Random(get_rank())
    with runs.observed(own_stream) as seen:
        model = deep("GPTNeo", 4 if pp == 2 else 8)
        config = config_of(stage, pp, 4, 1.0, **settings)
        engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
        collectives.PLANTED_DELAY = (lambda _: time.sleep(draw.random() * 0.004)) if late else None
        try:
            for window in range(3):
                given = batches(model, 4 * window, 4, replica(current_mesh()), lengths)
                seen.losses.append(float(engine.train_batch(given)))
        finally:
            collectives.PLANTED_DELAY = None
        engine.destroy()
    return seen


LATER = {"pipeline": {"schedule": "zero_bubble"}}
TWO = {"pipeline": {"schedule": "interleaved", "chunks": 2}}
CELLS = [
    (2, 2, 1, {}, True, True, True),
    *(
        pytest.param(ranks, pp, stage, settings, own, False, False, marks=pytest.mark.slow)
        for ranks, pp in ((2, 2), (4, 4), (4, 2))
        for stage in (0, 1, 3)
        for settings in ({}, TWO)
        for own in (False, True)
    ),
    pytest.param(4, 2, 1, {"tensor_parallel": {"autotp_size": 2}}, False, False, False, marks=pytest.mark.slow),
    pytest.param(2, 2, 3, TWO, False, True, True, marks=pytest.mark.slow),
    *(
        pytest.param(ranks, pp, stage, LATER, own, True, late, marks=pytest.mark.slow)
        for ranks, pp in ((2, 2), (4, 4), (4, 2))
        for stage in (0, 1)
        for own, late in ((False, False), (True, True))
    ),
]


@pytest.mark.parametrize(("ranks", "pp", "stage", "settings", "own", "lengths", "late"), CELLS)
def test_stages_train_as_on_the_cpu(
    workers: Any, emulated: Any, ranks: int, pp: int, stage: int, settings: Any, own: bool, lengths: bool, late: bool
) -> None:
    theirs = workers(ranks).run(staged, pp, stage, settings, False, lengths, False, timeout=LIMIT)
    ours = emulated(ranks).run(staged, pp, stage, settings, own, lengths, late, timeout=LIMIT)
    assert [report for rank in ours for report in rank.reports] == []
    for rank, other in zip(ours, theirs, strict=True):
        assert max(abs(a - b) / abs(b) for a, b in zip(rank.losses, other.losses, strict=True)) <= 2e-6
