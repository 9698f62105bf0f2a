"""Writes the small checkpoints that later versions must read for ever; each format was written by the code of its day.

    python -c "from tests.golden.kept_checkpoints import main; main('FORMAT')"

makes `tests/golden/checkpoints/<FORMAT>/<cell>`, refuses where one is, and cannot be run for a format of the past.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.pool import WorkerPool
from tests.parallel.checkpointing import everything, make, train
from tests.parallel.tiny import adamw

FOLDER = Path(__file__).parent / "checkpoints"
TAG, BEFORE, AFTER = "kept", 4, 4


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


# stage, ranks, precision, optimizer, keys of `zero_optimization`; all are saved in the middle of a window
CELLS: dict[str, tuple[int, int, str, Any, dict[str, Any]]] = {
    "stage0-fp32": (0, 2, "fp32", adamw, {}),
    "stage2-bf16": (2, 3, "bf16", adamw, {}),
    "stage3-bf16": (3, 2, "bf16", adamw, {"stage3_param_persistence_threshold": 0}),
    "whole-fp32": (1, 2, "fp32", adafactor, {}),
}


def engine_of(cell: str, seed: int) -> Any:
    stage, _, precision, optimizer, zero = CELLS[cell]
    return make(stage, precision, seed=seed, dropout=0.0, accumulation=3, optimizer=optimizer, zero=zero)


def write(cell: str, folder: str) -> None:
    platform.node = lambda: "host"  # manifests name the writer's
    with engine_of(cell, 0) as engine:
        batches = iter(engine.training_dataloader)
        train(engine, batches, BEFORE)
        engine.save_checkpoint(folder, TAG, client_state={"best": (0.5, "x"), "average": torch.arange(3.0)})
        expected = {"state": everything(engine), "losses": train(engine, batches, AFTER), "after": everything(engine)}
        if dist.get_rank() == 0:
            torch.save(expected, Path(folder, "expected.pt"))


def main(name: str) -> None:
    for cell in CELLS:
        folder = FOLDER / name / cell
        folder.mkdir(parents=True)
        pool = WorkerPool(CELLS[cell][1])
        pool.run(write, cell, str(folder), timeout=120)
        pool.close()
