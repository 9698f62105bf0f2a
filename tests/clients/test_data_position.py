"""A run that is killed again and again, with another number of ranks each time, learns from the same samples in the
same steps as one that is not: none lost, none twice.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.clients import position_runs
from tests.clients.position_runs import CARRIED, SAMPLES, STEPS
from tests.harness.pool import WorkerError

LOOPS = ("own", "plain", "accelerate", "trainer", "lightning")
WORLDS = (1, 2, 4, 3)
# loop, processes of the loader, ranks after the first kill, seed of the kills
FAST = [("own", 0, 0, 0)]


def cells() -> list[Any]:
    """Own loop: all kills × workers × rank orders; of the others 20 are drawn."""
    every = [("own", workers, second, seed) for workers in (0, 2) for second in range(4) for seed in range(5)]
    draw = random.Random(41)
    others = [
        (loop, workers, second, seed)
        for loop in LOOPS[1:]
        for workers in (0, 2)
        for second in range(4)
        for seed in range(5)
    ]
    chosen = every + [cell for loop in LOOPS[1:] for cell in draw.sample([c for c in others if c[0] == loop], 5)]
    chosen += [cell for cell in FAST if cell not in chosen]
    return [
        pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow, id="-".join(map(str, cell)))
        for cell in chosen
    ]


@pytest.mark.parametrize(("loop", "processes", "first", "seed"), cells())
def test_every_step_learns_from_the_same_samples(
    workers: Any, loop: str, processes: int, first: int, seed: int, tmp_path: Path
) -> None:
    run, draw = getattr(position_runs, loop), random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = workers(1).run(run, str(whole), 0, None, 100, timeout=180)[0]
    assert len(expected) == STEPS and all(len(step) == 12 for step in expected)
    size = CARRIED if loop == "own" else SAMPLES
    counts = Counter(sample for step in expected for sample in step)
    assert len(counts) == size and max(counts.values()) - min(counts.values()) <= 1
    every = draw.randint(1, 3)
    kills = 1 if (loop, processes, first, seed) in FAST else 4
    worlds = [WORLDS[number % 4] for number in range(first, first + kills + 1)]
    for number, world in enumerate(worlds[:-1]):
        try:
            found = workers(world).run(run, str(killed), processes, draw.randint(2, 6), every, timeout=180)[0]
        except WorkerError as died:
            assert "Traceback" not in str(died), died  # killed, and by nothing else
            continue
        assert number >= min(2, kills) and found == expected  # it was at its end before it could be killed
        return
    assert workers(worlds[-1]).run(run, str(killed), processes, None, every, timeout=180)[0] == expected
