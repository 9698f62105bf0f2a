"""Training with a checkpoint half way, whole or from there on: losses, and the weights' bytes. Runs on workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.clients import lightning_runs, transformers_runs
from tests.clients.accelerate_runs import accelerator_for, data, step_on
from tests.clients.common import RATE, UPDATES, Run, Words, falling, fresh_clients, whole_values

Outcome = tuple[list[float], dict[str, bytes]]


def outcome(losses: list[float], module: torch.nn.Module) -> Outcome:
    values = whole_values(module)
    return losses, {name: value.contiguous().view(torch.uint8).numpy().tobytes() for name, value in values.items()}


def dropping_model() -> Any:
    """Its dropout asks for the state of the random numbers, too."""
    return transformers_runs.small_model(embed_dropout=0.1)


def transformers(stage: int, precision: str, folder: str, resume: bool, make: Any = dropping_model) -> Outcome:
    from transformers import Trainer, TrainingArguments

    with transformers_runs.trainer_state(stage):
        more = {"save_strategy": "steps", "save_steps": UPDATES // 2}
        arguments = TrainingArguments(**transformers_runs.settings(stage, precision, folder, **more))
        trainer = Trainer(model=make(), args=arguments, train_dataset=transformers_runs.rows())
        trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{UPDATES // 2}") if resume else None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = outcome(losses[UPDATES // 2 :], trainer.model_wrapped.module)
        trainer.model_wrapped.destroy()
        return found


def peft(stage: int, precision: str, folder: str, resume: bool) -> Outcome:
    return transformers(stage, precision, folder, resume, lambda: transformers_runs.with_adapters(lora_dropout=0.1))


def accelerate(stage: int, precision: str, folder: str, resume: bool) -> Outcome:
    with fresh_clients():
        accelerator = accelerator_for(stage, precision)
        model = Words()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        model, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, data(accelerator), falling(optimizer)
        )
        accelerator.register_for_checkpointing(schedule)
        half = len(loader) // 2
        if resume:
            accelerator.load_state(folder)
        else:
            steps(accelerator, model, optimizer, schedule, list(loader)[:half])
            accelerator.save_state(folder)
        losses = steps(accelerator, model, optimizer, schedule, accelerator.skip_first_batches(loader, half))
        found = outcome(losses, model.module)
        model.destroy()
        return found


def steps(accelerator: Any, model: Any, optimizer: Any, schedule: Any, batches: Any) -> list[float]:
    losses = []
    for tokens in batches:
        losses.append(step_on(accelerator, model, optimizer, tokens))
        if accelerator.sync_gradients:
            schedule.step()
    return losses


def lightning(stage: int, precision: str, folder: str, resume: bool) -> Outcome:
    with fresh_clients():
        from lightning.pytorch.callbacks import ModelCheckpoint

        noted = Run()
        saves = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        more = {"enable_checkpointing": True, "max_epochs": 2, "callbacks": [saves]}
        trainer = lightning_runs.make_trainer(lightning_runs.trainer_strategy(stage), precision, folder, **more)
        module = lightning_runs.lightning_module(noted, sharded=True)
        path = str(Path(folder) / "epoch=0.ckpt") if resume else None
        trainer.fit(module, lightning_runs.batches(), ckpt_path=path, weights_only=False)
        engine = trainer.strategy.model
        found = outcome(noted.losses[-len(lightning_runs.batches()) // 2 :], engine.module)
        engine.destroy()
        return found


def fabric(stage: int, precision: str, folder: str, resume: bool) -> Outcome:
    with fresh_clients():
        fabric, model, optimizer, loader, schedule = lightning_runs.fabric_parts(stage, precision)
        batches = list(loader)
        half = len(batches) // 2
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "done": 0}
        if resume:
            fabric.load(folder, state, weights_only=False)
            assert state["done"] == half
        else:
            lightning_runs.fabric_steps(fabric, model, optimizer, schedule, batches[:half])
            fabric.save(folder, state | {"done": half})
        run = lightning_runs.fabric_steps(fabric, model, optimizer, schedule, batches[half:])
        found = outcome(run.losses, model._forward_module.module)
        model._forward_module.destroy()
        return found
