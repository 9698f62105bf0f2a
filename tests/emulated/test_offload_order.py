"""What rests on a disk is read before it is needed, on the emulated device."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch

from deepspeed.storage.nvme_tier import _OnDisk
from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()

ON_DISK = Cell(stage=3, ranks=2, dtype="bf16", tier="nvme-nvme", accumulation=2, small_buckets=True)


def reads_of_slices(steps: int) -> Counter[str]:
    """How the reads of parameters' slices began, once the order of units is known."""
    found: Counter[str] = Counter()
    load, ahead = _OnDisk._load, _OnDisk.prefetch
    begun: list[str] = []

    def noted(stored: Any, read: bool) -> None:
        if stored.label.startswith("values of") and read:
            found["ahead" if begun else "when needed"] += 1
        load(stored, read)

    def early(stored: Any) -> None:
        begun.append("ahead")
        ahead(stored)
        begun.pop()

    engine = runs.engine_of(ON_DISK)
    for step in range(steps):
        if step == 1:
            patches = mock.patch.multiple(_OnDisk, _load=noted, prefetch=early)
            patches.start()
        for micro in range(ON_DISK.accumulation):
            runs.micro_step(engine, step, micro)
    patches.stop()
    torch.cuda.synchronize()
    engine.destroy()
    return found


def test_slices_that_are_sent_are_read_ahead(emulated):
    for found in emulated(2).run(reads_of_slices, 3, timeout=LIMIT):
        assert found["ahead"] >= found["when needed"] > 0, found  # the first two units of a pass have nothing before
