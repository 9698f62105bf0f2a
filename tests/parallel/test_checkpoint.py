"""Resume on the same topology: the next steps are those of a run that never stopped, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed.utils import RepeatingLoader
from tests.parallel.checkpointing import differences, everything, make, train

RANKS = 2


def counted(engine: Any) -> tuple[Any, ...]:
    numbers = (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps)
    return *numbers, engine.get_lr(), engine.loss_scale()


def resume(folder: str, stage: int, precision: str, accumulation: int, before: int, after: int) -> None:
    settings = {"accumulation": accumulation}
    with make(stage, precision, **settings) as engine:
        batches = iter(RepeatingLoader(engine.training_dataloader))
        train(engine, batches, before)
        assert engine.save_checkpoint(folder, client_state={"best": 0.5})
        losses = train(engine, batches, after)
        wanted = everything(engine)
        counters = counted(engine)
    with make(stage, precision, seed=1, **settings) as engine:
        path, client = engine.load_checkpoint(folder)
        assert path is not None and client.pop("ds_version") and client == {"best": 0.5}
        batches = iter(RepeatingLoader(engine.training_dataloader))
        assert train(engine, batches, after) == losses
        assert not differences(everything(engine), wanted)
        assert counted(engine) == counters


@pytest.mark.drawn(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_exact(workers: Any, tmp_path: Path, stage: int, precision: str) -> None:
    workers(RANKS).run(resume, str(tmp_path), stage, precision, 1, 3, 4, timeout=120)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_in_the_middle_of_a_window_is_exact(workers: Any, tmp_path: Path, stage: int, precision: str) -> None:
    workers(RANKS).run(resume, str(tmp_path), stage, precision, 3, 4, 7, timeout=120)
