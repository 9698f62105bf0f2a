"""Disks that fail under an engine: an error that names tensor and file, nothing half-written taken for data."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import torch

from deepspeed.errors import MemoryExhaustedError, StorageError
from tests.parallel.tiny import Tiny, adamw, masters, micro_step, raises, start
from tests.parity.cells import tier_of


def engine_on(folder: str, stage: int = 3) -> Any:
    zero = tier_of("nvme-nvme" if stage == 3 else "nvme")
    for section in zero.values():
        section["nvme_path"] = folder
    return start(stage, optimizer=adamw, zero=zero)


def descriptor(engine: Any) -> int:
    return engine.optimizer.groups[0].tiers.optimizer.disk._file.plain


def healthy(folder: str) -> None:
    """The next run starts clean, and no file has a name."""
    assert os.listdir(folder) == []
    engine = engine_on(folder)
    for step in range(2):
        micro_step(engine, step)
    assert all(values.isfinite().all() for values in masters(engine).values())
    assert os.listdir(folder) == []
    engine.destroy()


def full(folder: str) -> None:
    """The disk is full when the first step makes optimizer state."""
    engine = engine_on(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(descriptor(engine)).st_size, before[1]))
    try:
        with raises(StorageError, "optimizer state of layers.0.0.weight", folder, "free"):
            micro_step(engine, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.destroy()
    healthy(folder)


def truncated(folder: str) -> None:
    engine = engine_on(folder)
    micro_step(engine, 0)
    os.ftruncate(descriptor(engine), 4096)
    for _ in range(2):  # what was lost stays lost, also for whoever tries again
        with raises(StorageError, "values of ", folder, "truncated the file"):  # a write under way made it longer again
            micro_step(engine, 1)
    engine.destroy()
    healthy(folder)


def removed(folder: str) -> None:
    """The folder goes away under a run: its file has no name, so nothing is lost."""
    wanted = engine_on(folder)
    for step in range(3):
        micro_step(wanted, step)
    expected = masters(wanted)
    wanted.destroy()
    engine = engine_on(folder)
    micro_step(engine, 0)
    os.rmdir(folder)
    for step in (1, 2):
        micro_step(engine, step)
    found = masters(engine)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    engine.destroy()
    healthy_again = engine_on(folder)
    healthy_again.destroy()


def unwritable(folder: str) -> None:
    path = os.path.join(folder, "taken")
    with open(path, "w"):
        pass
    with raises(StorageError, "nvme_path", path):
        engine_on(path)
    os.remove(path)
    healthy(folder)


def too_small(_: str) -> None:
    """Without offload, running out of memory suggests it."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    lines = open("/proc/self/status").read().splitlines()
    held = int(next(line for line in lines if line.startswith("VmData")).split()[1]) * 1024

    class Wide(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Linear(2000, 8000)

    model = Wide()
    adamw(model.parameters())  # the first one imports a good part of torch
    resource.setrlimit(resource.RLIMIT_DATA, (held + 120_000_000, before[1]))
    try:
        with raises(MemoryExhaustedError, "offload_optimizer", "nvme"):
            engine = start(2, model, optimizer=adamw, precision="bf16")
            engine.backward(engine(torch.ones(2, 6)).float().sum() + model.wide(torch.ones(1, 2000)).float().sum())
            engine.step()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("fault", [full, truncated, removed, unwritable, too_small], ids=lambda fault: fault.__name__)
def test_a_failing_disk(workers: Any, tmp_path: Any, fault: Any) -> None:
    (tmp_path / "swap").mkdir()
    workers(1).run(fault, str(tmp_path / "swap"))
