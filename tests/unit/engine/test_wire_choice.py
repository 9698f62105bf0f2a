"""`"wire": "auto"`: the most exact codec that is as fast as the fastest one."""

from __future__ import annotations

import pytest

from deepspeed.engine.wire_choice import LinkCosts

ELEMENTS = 10_000_000.0  # received gradients, and weights, of a 20 M model on two ranks


@pytest.mark.parametrize(
    ("megabytes_per_second", "compute", "chosen"),
    [(12.5, 0.6, "int8"), (125.0, 0.6, "int8"), (1250.0, 10.0, "none"), (125.0, 60.0, "none"), (1250.0, 0.5, "bf16")],
)
def test_the_choice(megabytes_per_second: float, compute: float, chosen: str) -> None:
    costs = LinkCosts(megabytes_per_second * 1e6, 1e-9, ELEMENTS, ELEMENTS)
    step = costs.predicted(compute, "int8")
    assert costs.compute(step, "int8") == pytest.approx(compute, rel=1e-6)
    assert costs.best(step) == chosen


def test_slow_coding_is_not_taken() -> None:
    costs = LinkCosts(1.25e9, 1e-7, ELEMENTS, ELEMENTS)
    assert costs.best(costs.predicted(0.5, "int8")) == "bf16"
