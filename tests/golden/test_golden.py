"""Ten losses per precision, the same at every stage, kept as text: a change is looked at, never written over blindly.

To see a change: run the test; the message holds the new lines. To accept it, put them into the file by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.parallel.tiny import STAGES, adamw, start
from tests.parity.models import batch, small_lm

FOLDER = Path(__file__).parent
STEPS = 10
BARS = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 2e-3}  # relative; processors differ in the last bits


def losses(stage: int, precision: str) -> list[float]:
    with start(stage, small_lm(), adamw, precision=precision, clip=1.0) as engine:
        found = []
        for step in range(STEPS):
            loss = engine(*batch(step % 3, 0, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found


@pytest.mark.drawn(4)
@pytest.mark.parametrize("precision", BARS)
@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_the_kept_ones(workers: Any, stage: int, precision: str) -> None:
    path = FOLDER / f"{precision}.txt"
    found = workers(2).run(losses, stage, precision, timeout=60)[0]
    lines = "".join(f"{loss:.6f}\n" for loss in found)
    kept = [float(line) for line in path.read_text().split()] if path.exists() else []
    assert len(kept) == STEPS, f"{path.name} should hold\n{lines}"
    assert found == pytest.approx(kept, rel=BARS[precision]), f"{path.name} now would hold\n{lines}"
