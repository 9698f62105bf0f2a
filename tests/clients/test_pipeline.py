"""What clients can do with stages: Accelerate prepares such an engine; loops by micro-batch are refused by name."""

from __future__ import annotations

from typing import Any

from tests.clients.common import fresh_clients
from tests.clients.transformers_runs import rows, settings, small_model, trainer_state
from tests.parallel.dense import momentum
from tests.parallel.pipeline_runs import apart, batches, config_of, deep
from tests.parallel.tiny import raises


def run_trainer() -> None:
    """Its loop calls the model: refused by name on all ranks, before anything is computed."""
    from transformers import Trainer, TrainingArguments

    from deepspeed.errors import PipelineError

    with trainer_state(1) as folder:
        values = settings(1, "fp32", folder)
        values["deepspeed"]["pipeline"] = {"stages": 2}
        values["deepspeed"].pop("train_batch_size", None)  # the Trainer would count a rank of a stage as one more batch
        trainer = Trainer(model=small_model(), args=TrainingArguments(**values), train_dataset=rows())
        with raises(PipelineError, "train_batch"):
            trainer.train()


def run_accelerate() -> float:
    """`prepare` gives a wrapped engine of stages, whose windows train as they do without Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    import deepspeed
    from tests.parallel.dense import Dense
    from tests.parallel.tensor_runs import loss_of

    with fresh_clients():
        plugin = DeepSpeedPlugin(hf_ds_config=config_of(1, 2))
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = deep("GPTNeo", 2)
        dense = Dense(model, momentum, 1, 4)
        engine, _ = accelerator.prepare(model, momentum(model.parameters()))
        assert isinstance(engine, deepspeed.PipelineEngine)
        dense.window(0, loss_of)
        dense.step()
        engine.train_batch(batches(engine.module, 0, 4, 0))
        found = apart(engine, dense)
        engine.destroy()
        return found


def test_the_trainers_loop_is_refused_by_name(workers: Any) -> None:
    workers(2).run(run_trainer, timeout=120)


def test_accelerate_prepares_stages(workers: Any) -> None:
    for gap in workers(2).run(run_accelerate, timeout=120):
        assert gap <= 1e-6
