"""Fine-tune GPT-Neo with Lightning: `deepspeed --num_gpus 2 examples/gpt_neo/with_lightning.py`."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from common import load_model, parse_arguments, report, sequences
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader


class OnCPU(DeepSpeedStrategy):
    """Lightning's strategy asks for CUDA; everything but that works on CPU."""

    def setup_environment(self) -> None:
        """As the strategy's parent does."""
        super(DeepSpeedStrategy, self).setup_environment()

    @property
    def root_device(self) -> torch.device:
        """The CPU, numbered by rank as the strategy expects of a device."""
        return torch.device("cpu", self.local_rank)


class GPTNeo(pl.LightningModule):
    """The model, made where Lightning asks for it, so that at stage 3 it is born sharded."""

    def __init__(self, arguments: Any, tokenizer: Any) -> None:
        super().__init__()
        self.arguments, self.tokenizer, self.model = arguments, tokenizer, None

    def configure_model(self) -> None:
        """Once, before the strategy shards."""
        if self.model is None:
            self.model = load_model(self.arguments, self.tokenizer)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The mean loss of a micro-batch."""
        return self.model(**batch).loss

    def validation_step(self, batch: Any, index: int) -> None:
        """The loss on held-out text."""
        self.log("held_out", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any torch optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.arguments.lr)


def main() -> None:
    """Validate, fit, validate."""
    arguments = parse_arguments(__doc__)
    cpu = not torch.cuda.is_available()
    if cpu:
        import lightning.pytorch.strategies.deepspeed as home

        home._validate_device_index_selection = lambda devices: None
    tokenizer, rows, held_out = sequences(arguments)
    loader = DataLoader(rows, batch_size=arguments.micro, shuffle=True)
    checks = DataLoader(held_out, batch_size=arguments.micro)
    trainer = pl.Trainer(
        accelerator="cpu" if cpu else "gpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=OnCPU(stage=arguments.stage) if cpu else f"deepspeed_stage_{arguments.stage}",
        precision="32-true" if cpu else "bf16-mixed",
        max_steps=arguments.steps,
        limit_val_batches=len(checks),
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    model = GPTNeo(arguments, tokenizer)
    before = trainer.validate(model, checks, verbose=False)[0]["held_out"]
    trainer.fit(model, loader)
    after = trainer.validate(model, checks, verbose=False)[0]["held_out"]
    if trainer.is_global_zero:
        report(before, after, arguments)


if __name__ == "__main__":
    main()
