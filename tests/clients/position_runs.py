"""Training in five loops that may be killed at any micro-batch: which samples every step has learnt from.

A run saves a checkpoint, with the samples so far, after some of its steps, and ends by SIGKILL or after the last step.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import deepspeed
from deepspeed.data.loader import DeepSpeedDataLoader
from tests.clients import lightning_runs, transformers_runs
from tests.clients.accelerate_runs import gloo
from tests.clients.common import fresh_clients

GLOBAL_BATCH, SAMPLES, CARRIED, STEPS = 12, 60, 47, 11
# ranks: samples of a micro-batch, micro-batches of a step on each rank
SHAPES = {1: (6, 2), 2: (3, 2), 3: (2, 2), 4: (3, 1)}


class Rows(Dataset):
    """Sample i is its number and a row of features."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size
        self.features = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": torch.tensor(index), "features": self.features[index]}


class Model(torch.nn.Module):
    """A layer that remembers the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, number: torch.Tensor, features: torch.Tensor, **other: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(features).square().mean()}


class Journal:
    """Samples of every step, of all ranks, and the micro-batch at which this run is killed.

    Args:
        folder: where the journal is kept.
        kill: micro-batch of the run, from 1, in whose place all ranks are killed; None: none.
    """

    def __init__(self, folder: str, kill: int | None) -> None:
        self.path, self.kill = Path(folder, "journal.json"), kill
        self.samples: list[int] = []
        self.taken = 0

    def take(self, numbers: torch.Tensor) -> None:
        """Note the samples of a micro-batch; or end here."""
        self.taken += 1
        if self.taken == self.kill:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        together: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(together, numbers.tolist())
        self.samples += [sample for one in together for sample in one]

    def save(self) -> None:
        if dist.get_rank() == 0:
            self.path.write_text(json.dumps(self.samples))

    def load(self, trained: int) -> None:
        """Go on after a checkpoint at which `trained` samples had been used."""
        samples = json.loads(self.path.read_text())
        assert len(samples) >= trained, "the position is ahead of what was trained"
        self.samples = samples[:trained]

    def steps(self) -> list[list[int]]:
        """Samples of each step, sorted."""
        return [sorted(self.samples[at : at + GLOBAL_BATCH]) for at in range(0, len(self.samples), GLOBAL_BATCH)]


def _engine(workers: int, carry: bool, stage: int) -> Any:
    micro, accumulation = SHAPES[dist.get_world_size()]
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "dataloader_carry_last": carry,
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    engine.training_dataloader = engine.deepspeed_io(Rows(CARRIED if carry else SAMPLES), num_local_io_workers=workers)
    return engine


def _trained(engine: Any) -> int:
    """Return how many samples the engine has used, also in an unfinished window."""
    micro = engine.train_micro_batch_size_per_gpu() * dist.get_world_size()
    return engine.global_steps * GLOBAL_BATCH + engine._state.window.seen * micro


def own(folder: str, workers: int, kill: int | None, every: int, carry: bool = True, looped: bool = True) -> Any:
    """`engine.loop` over `training_data`, or a plain loop over it; saves after each `every`-th micro-batch."""
    engine, journal = _engine(workers, carry, 1), Journal(folder, kill)
    if engine.load_checkpoint(folder)[0] is not None:
        journal.load(_trained(engine))
    while engine.global_steps < STEPS:
        loader = engine.training_dataloader
        for batch in engine.loop(loader) if looped else loader:
            journal.take(batch["number"])
            engine.backward(engine(**batch)["loss"])
            engine.step()
            if journal.taken % every == 0:
                journal.save()
                engine.save_checkpoint(folder)
            if engine.global_steps == STEPS:
                break
    steps = journal.steps()
    engine.destroy()
    return steps


def plain(folder: str, workers: int, kill: int | None, every: int) -> Any:
    """The usual loop over the loader of `initialize`."""
    return own(folder, workers, kill, every, carry=False, looped=False)


def accelerate(folder: str, workers: int, kill: int | None, every: int) -> Any:
    """Accelerate's loop over its own prepared loader, which goes on by `skip_first_batches`."""
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin

    micro, accumulation = SHAPES[dist.get_world_size()]
    with fresh_clients():
        plugin = DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=accumulation)
        # the order of an epoch then depends on its number alone
        loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=gloo(), dataloader_config=loading)
        whole = DataLoader(Rows(), batch_size=micro, shuffle=True, num_workers=workers)
        model = Model()
        model, _, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), whole)
        journal, saved = Journal(folder, kill), Path(folder, "saved.json")
        step = json.loads(saved.read_text()) if saved.exists() else 0
        if step:
            accelerator.load_state(str(Path(folder, "state")))
            journal.load(step * GLOBAL_BATCH)
        per_epoch = SAMPLES // GLOBAL_BATCH
        while step < STEPS:
            epoch, within = divmod(step, per_epoch)
            loader.set_epoch(epoch)
            for index, batch in enumerate(accelerator.skip_first_batches(loader, within * accumulation), start=1):
                journal.take(batch["number"])
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                if index % accumulation == 0:
                    step += 1
                    if step % every == 0:
                        accelerator.save_state(str(Path(folder, "state")))
                        journal.save()
                        if dist.get_rank() == 0:
                            saved.write_text(json.dumps(step))
                        dist.barrier()
                    if step == STEPS:
                        break
        steps = journal.steps()
        model.destroy()
        return steps


def trainer(folder: str, workers: int, kill: int | None, every: int) -> Any:
    """Transformers' Trainer, which goes on by itself."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    micro, accumulation = SHAPES[dist.get_world_size()]
    journal = Journal(folder, kill)

    class Noting(Trainer):
        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            journal.take(inputs["number"])
            return super().training_step(model, inputs, *more)

    class Saving(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            journal.save()

    with transformers_runs.trainer_state(1):
        more = {
            "save_strategy": "steps",
            "save_steps": every,
            "max_steps": STEPS,
            "logging_steps": 100,
            "warmup_steps": 0,
        }
        more |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
        more |= {"remove_unused_columns": False, "dataloader_num_workers": workers}
        settings = transformers_runs.settings(1, "fp32", folder, **more)
        settings["deepspeed"]["zero_optimization"] = {"stage": 1}
        arguments = TrainingArguments(**settings)
        made = Noting(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Saving()])
        steps = [int(path.name.split("-")[1]) for path in Path(folder).glob("checkpoint-*")]
        whole = [step for step in steps if Path(folder, f"checkpoint-{step}", "trainer_state.json").exists()]
        if whole:
            journal.load(max(whole) * GLOBAL_BATCH)
        made.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{max(whole)}")) if whole else None)
        made.model_wrapped.destroy()
    return journal.steps()


def lightning(folder: str, workers: int, kill: int | None, every: int) -> Any:
    """Lightning's Trainer over `DeepSpeedDataLoader`, whose position it saves and loads by itself."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    # Lightning counts micro-batches: on other ranks it goes on if a step has as many as before
    micro, journal = GLOBAL_BATCH // dist.get_world_size(), Journal(folder, kill)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            journal.take(batch["number"])
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return DeepSpeedDataLoader(Rows(), micro, num_workers=workers)

    class Saving(ModelCheckpoint):
        def _save_checkpoint(self, *arguments: Any) -> None:
            super()._save_checkpoint(*arguments)
            journal.save()

    with fresh_clients():
        saves = Saving(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
        more = {"enable_checkpointing": True, "max_epochs": -1, "max_steps": STEPS, "callbacks": [saves]}
        more |= {"accumulate_grad_batches": 1, "use_distributed_sampler": False}
        strategy = lightning_runs.trainer_strategy(1)
        made = lightning_runs.make_trainer(strategy, "fp32", folder, **more)
        paths = sorted(Path(folder).glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
        path = str(paths[-1]) if paths else None
        if paths:
            journal.load(int(paths[-1].stem.split("=")[1]) * GLOBAL_BATCH)
        made.fit(Module(), ckpt_path=path, weights_only=False)
        made.strategy.model.destroy()
    return journal.steps()
