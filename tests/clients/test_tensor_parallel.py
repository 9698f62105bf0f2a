"""Transformers' Trainer, unmodified, with `autotp_size` in its JSON: what one rank alone computes, and whole files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.common import UPDATES, Run
from tests.clients.transformers_runs import noted, rows, settings, small_model, trainer_state


def run_cut(stage: int | None, tp: int) -> tuple[Run, dict[str, tuple[int, ...]]]:
    """What was logged, and the shapes of the tensors in the saved model, by rank 0."""
    import torch.distributed as dist
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    with trainer_state(stage) as folder:
        values = settings(stage, "fp32", folder)
        if stage is not None:
            values["deepspeed"]["tensor_parallel"] = {"autotp_size": tp}
            values["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        trainer = Trainer(model=small_model(), args=TrainingArguments(**values), train_dataset=rows())
        trainer.train()
        trainer.save_model(folder)
        shapes = {}
        if dist.get_rank() == 0:
            shapes = {name: tuple(t.shape) for name, t in load_file(f"{folder}/model.safetensors").items()}
        dist.barrier()
        return noted(trainer), shapes


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2, 3))])
def test_the_trainer_trains_a_cut_model(workers: Any, stage: int) -> None:
    alone, wanted = workers(1).run(run_cut, None, 1, timeout=120)[0]
    cut = workers(2).run(run_cut, stage, 2, timeout=240)
    for run, _ in cut:
        assert run.updates == UPDATES and len(run.losses) == len(alone.losses)
        assert torch.allclose(torch.tensor(run.losses), torch.tensor(alone.losses), rtol=1e-5)
        assert torch.allclose(torch.tensor(run.norms), torch.tensor(alone.norms), rtol=1e-4)
    assert cut[0][1] == wanted
