"""Sequences that two devices share: the CPU's losses, and no report."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import STEPS, Seen, observed
from tests.parallel.sequence_runs import batch_of, config_of, start
from tests.parallel.tensor_runs import model_of

need_compiler()


def train(stage: int, own_stream: bool, kind: str) -> Seen:
    with observed(own_stream) as seen:
        engine = start(model_of("Llama"), config_of({"sp": 2}, stage))
        for step in range(STEPS):
            given = {name: value.to(engine.device) for name, value in batch_of(step, 0, kind=kind).items()}
            loss = engine(**given, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            seen.losses.append(float(loss))
        engine.destroy()
        del engine
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_losses_are_the_cpus(workers: Any, emulated: Any, stage: int, own_stream: bool, kind: str) -> None:
    theirs = workers(2).run(train, stage, False, kind, timeout=LIMIT)
    for seen, other in zip(emulated(2).run(train, stage, own_stream, kind, timeout=LIMIT), theirs, strict=True):
        assert seen.reports == [], "\n".join(seen.reports[:3])
        assert max(abs(a - b) / b for a, b in zip(seen.losses, other.losses, strict=True)) <= 2e-6
