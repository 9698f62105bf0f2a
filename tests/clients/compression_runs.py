"""Clients through a removal and an export: units leave while a client trains, and plain Transformers loads the folder.

Functions run on workers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.clients import transformers_runs as base
from tests.clients.common import MICRO, RATE, fresh_clients, sentences, zero

AFTER = 3  # applied steps until the FFN is half as wide


def block(folder: str) -> dict[str, Any]:
    shared = {"enabled": True, "method": "l1", "schedule_offset": AFTER}
    group = {"params": {"dense_ratio": 0.5}, "modules": [r"mlp\.c_fc$"]}
    return {
        "row_pruning": {"shared_parameters": shared, "different_groups": {"g": group}},
        "export": {"folder": folder},
    }


def check(module: Any, folder: str, found: torch.Tensor) -> None:
    """The engine is smaller, the folder is what was exported, and it gives what the engine gave (at that step)."""
    from transformers import AutoModelForCausalLM

    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
    assert [shape for name, shape in shapes.items() if name.endswith("c_fc.weight")] == [(64, 32), (64, 32)], shapes
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.config.intermediate_size == 64
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=sentences(2)).logits, found, atol=1e-5)


def logits(engine: Any, call: Any = None) -> torch.Tensor:
    engine.eval()
    with torch.no_grad():
        found = (call or engine)(input_ids=sentences(2)).logits.clone()
    engine.train()
    return found


def by_transformers(stage: int, folder: str, adapters: bool = False) -> None:
    from transformers import Trainer, TrainingArguments

    with base.trainer_state(stage):
        values = base.settings(stage, "fp32", f"{folder}/run", max_steps=AFTER + 2)
        values["deepspeed"]["compression_training"] = {**block(f"{folder}/small"), "export": {}}
        model = base.with_adapters() if adapters else base.small_model()
        trainer = Trainer(model=model, args=TrainingArguments(**values), train_dataset=base.rows())
        trainer.train()
        engine = trainer.model_wrapped
        engine.export_compressed(f"{folder}/small")
        check(engine.module, f"{folder}/small", logits(engine))
        engine.destroy()


def by_peft(stage: int, folder: str) -> None:
    by_transformers(stage, folder, adapters=True)


def by_accelerate(stage: int, folder: str) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin

    from tests.clients.accelerate_runs import gloo

    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": zero(stage),
        "compression_training": block(f"{folder}/small"),
    }
    with fresh_clients():
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=gloo())
        model = base.small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        engine, optimizer = accelerator.prepare(model, optimizer)
        for step in range(AFTER):
            tokens = sentences(20)[2 * step : 2 * step + 2]
            accelerator.backward(engine(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        check(engine.module, f"{folder}/small", logits(engine))
        engine.destroy()


def by_lightning(stage: int, folder: str) -> None:
    import lightning.pytorch as pl

    from tests.clients.lightning_runs import trainer_strategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = base.small_model()

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(input_ids=tokens, labels=tokens).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=RATE)

    config = {"zero_optimization": zero(stage), "compression_training": block(f"{folder}/small")}
    with fresh_clients():
        strategy = trainer_strategy(stage, config=config)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_steps=AFTER, max_epochs=1,
            enable_model_summary=False, **quiet,
        )  # fmt: skip
        module = Module()
        loader = torch.utils.data.DataLoader(sentences(40), batch_size=MICRO)  # type: ignore[arg-type]
        trainer.fit(module, loader)
        engine = trainer.strategy.model
        check(engine.module, f"{folder}/small", logits(engine, module.net))
        engine.destroy()
