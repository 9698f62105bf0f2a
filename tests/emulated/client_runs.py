"""The clients on the emulated device, as their own documentation starts them where there are GPUs."""

from __future__ import annotations

from typing import Any

from tests.clients import accelerate_runs, lightning_runs, transformers_runs
from tests.clients.common import Run
from tests.emulated.runs import observed


def accelerate(stage: int) -> Run:
    return accelerate_runs.train(stage, "fp32")


def transformers(stage: int) -> Run:
    return transformers_runs.run_trainer(stage, "fp32", transformers_runs.small_model, use_cpu=False)


def lightning(stage: int) -> Run:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return lightning_runs.fitted(stage, "fp32", DeepSpeedStrategy(stage=stage), accelerator="gpu")


def seen(client: Any, stage: int) -> tuple[Run, list[str], dict[str, int]]:
    """What a client noted, and what the emulated device saw."""
    with observed() as saw:
        run = client(stage)
    return run, saw.reports, saw.counters
