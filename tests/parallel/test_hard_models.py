"""Models and loops that break sharding engines: each equals the dense reference at every stage, without a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.reference import largest_difference
from tests.parity.worlds import EngineWorld, ReferenceWorld

RANKS = 2
BARS = {  # per label: the first value, and later ones (in bf16 a rounding may flip, and the step amplifies it)
    "fp32": {"loss": (1e-6, 1e-6), "masters": (1e-6, 1e-6), "gradients": (1e-6, 1e-6), "evaluation": (1e-5, 1e-5)},
    "bf16": {"loss": (1e-2, 1e-2), "masters": (1e-6, 1e-3), "gradients": (1e-6, 1e-2), "evaluation": (1e-1, 1e-1)},
}
Notes = list[tuple[str, Any]]


def run_case(name: str, stage: int, precision: str, sharded: bool = True) -> Notes:
    world = EngineWorld(stage, precision, sharded)
    CASES[name](world)
    world.close()
    return world.notes


def difference(label: str, ours: Any, theirs: Any) -> float:
    if label == "loss":
        return abs(ours - theirs) / max(1e-12, abs(theirs))
    if isinstance(ours, torch.Tensor):
        return largest_difference({label: ours}, {label: theirs})
    return largest_difference(ours, theirs)


def misses(notes: Notes, wanted: Notes, precision: str) -> list[str]:
    """The bars that one rank's notes miss, in words."""
    assert [label for label, _ in notes] == [label for label, _ in wanted]
    seen: set[str] = set()
    found = []
    for place, ((label, ours), (_, theirs)) in enumerate(zip(notes, wanted, strict=True)):
        first, later = BARS[precision][label]
        bar = later if label in seen else first
        seen.add(label)
        gap = difference(label, ours, theirs)
        if not gap <= bar:
            found.append(f"note {place} ({label}): {gap:.3g} > {bar:g}")
    return found


def check(workers: Any, name: str, stage: int, precision: str, sharded: bool = True) -> None:
    world = ReferenceWorld(RANKS, precision)
    CASES[name](world)
    outcomes = workers(RANKS).run(run_case, name, stage, precision, sharded, timeout=90)
    for rank, notes in enumerate(outcomes):
        assert not misses(notes, world.notes[rank], precision), f"rank {rank}"


@pytest.mark.drawn(30)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_reference(workers: Any, name: str, stage: int, precision: str) -> None:
    check(workers, name, stage, precision)


def test_equals_the_dense_reference_at_default_limits(workers: Any) -> None:
    check(workers, "module_used_three_times", 3, "bf16", sharded=False)
