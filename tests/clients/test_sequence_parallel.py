"""Transformers' Trainer, unmodified, over sequences that two ranks share: what one rank alone computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.errors import DataError
from tests.clients.common import WORDS, Run
from tests.clients.transformers_runs import noted, rows, settings, trainer_state
from tests.parallel.tensor_runs import model_of
from tests.parallel.tiny import raises


def run_by_json_alone() -> None:
    """Accelerate, which knows of no sequences, deals to all ranks: refused in the first batch, with what to ask for."""
    from transformers import Trainer, TrainingArguments

    with trainer_state(1) as folder:
        values = settings(1, "fp32", folder)
        values["deepspeed"]["sequence_parallel_size"] = 2
        trainer = Trainer(
            model=model_of("Llama", vocab_size=WORDS), args=TrainingArguments(**values), train_dataset=rows()
        )
        with raises(DataError, "ranks 0 and 1", "ParallelismConfig(sp_size=2, sp_backend='deepspeed')"):
            trainer.train()
        trainer.model_wrapped.destroy()


@pytest.mark.slow
def test_the_number_in_the_json_alone_is_refused_by_name(workers: Any) -> None:
    workers(2).run(run_by_json_alone, timeout=120)


def run_shared(stage: int | None, sp: int) -> Run:
    from transformers import Trainer, TrainingArguments

    with trainer_state(stage) as folder:
        values = settings(stage, "fp32", folder)
        if stage is not None:
            from accelerate import ParallelismConfig

            values["parallelism_config"] = ParallelismConfig(sp_size=sp, sp_backend="deepspeed")
        trainer = Trainer(
            model=model_of("Llama", vocab_size=WORDS), args=TrainingArguments(**values), train_dataset=rows()
        )
        trainer.train()
        return noted(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_trainer_trains_shared_sequences(workers: Any, stage: int) -> None:
    alone = workers(1).run(run_shared, None, 1, timeout=120)[0]
    for run in workers(2).run(run_shared, stage, 2, timeout=300):
        assert run.updates == alone.updates and len(run.losses) == len(alone.losses)
        assert torch.allclose(torch.tensor(run.losses), torch.tensor(alone.losses), rtol=1e-5)
        assert torch.allclose(torch.tensor(run.norms), torch.tensor(alone.norms), rtol=1e-4)
