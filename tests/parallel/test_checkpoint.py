"""Resume on the same topology: the next steps are those of a run that never stopped, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import RepeatingLoader
from tests.parallel.checkpointing import differences, everything, make, train
from tests.parallel.pipeline_runs import config_of, deep, engine_of
from tests.parallel.tiny import expect_close, loss_of, masters, rows, start, tiny

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


def micro_step(engine: Any, step: int) -> None:
    """In the first one, rank 0 uses no module."""
    batch = rows(step, dist.get_rank())
    engine.backward(loss_of(engine, batch) if step or dist.get_rank() else batch.requires_grad_().square().mean())
    engine.step()


def one_rank_without_gradients(folder: str, stage: int) -> None:
    found = []
    for saves, loads in ((False, False), (True, False), (False, True)):
        with start(stage, tiny(seed=int(loads)), accumulation=2) as engine:
            if loads:
                engine.load_checkpoint(folder)
            else:
                micro_step(engine, 0)
            if saves:
                engine.save_checkpoint(folder)
            micro_step(engine, 1)
            found.append(masters(engine))
    for other in found[1:]:  # at stage 3 the save has reduced what the run reduces later: in another order
        expect_close(other, found[0])


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_window_in_which_one_rank_has_no_gradient_yet(workers: Any, tmp_path: Path, stage: int) -> None:
    workers(RANKS).run(one_rank_without_gradients, str(tmp_path), stage, timeout=60)


def one_stage_with_gradients(folder: str) -> list[float]:
    """The program sets gradients of the last stage between two windows."""
    for saves in (True, False):
        with engine_of(deep("GPTNeo", 2), config_of(1, 2, 2)) as engine:
            params = list(engine.module.parameters())
            if saves and engine.is_last_stage():
                params[-1].grad = torch.full_like(params[-1], 0.5)
            engine.save_checkpoint(folder) if saves else engine.load_checkpoint(folder)
            grads = [float(param.grad.mean()) for param in params if param.grad is not None]
    return grads


def test_stages_without_gradients_of_a_window(workers: Any, tmp_path: Path) -> None:
    assert workers(RANKS).run(one_stage_with_gradients, str(tmp_path), timeout=60) == [[], [0.5]]
