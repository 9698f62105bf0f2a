"""Train one Lightning model under the strategy that the config group names.

deepspeed --num_gpus 2 examples/hydra_lightning/train.py strategy=deepspeed_stage_3
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from model import ByteModel, loader
from omegaconf import DictConfig
from torch import nn

CPU = not torch.cuda.is_available()
sys.argv = [argument for argument in sys.argv if not argument.startswith("--local_rank")]  # Hydra reads the rest


class DeepSpeedOnCPU(DeepSpeedStrategy):
    """Lightning's strategy asks for CUDA; everything but that works on CPU."""

    def setup_environment(self) -> None:
        """As the strategy's parent does."""
        super(DeepSpeedStrategy, self).setup_environment()

    @property
    def root_device(self) -> torch.device:
        """The CPU, numbered by rank as the strategy expects of a device."""
        return torch.device("cpu", self.local_rank)


def strategy_of(config: DictConfig) -> Any:
    """The Lightning strategy of a config."""
    arguments = dict(config.strategy.arguments)
    if config.strategy.kind == "ddp":
        return DDPStrategy(**arguments)
    if config.strategy.kind == "fsdp":
        return FSDPStrategy(**arguments)
    if not CPU:
        return DeepSpeedStrategy(**arguments)
    import lightning.pytorch.strategies.deepspeed as home

    home._validate_device_index_selection = lambda devices: None
    return DeepSpeedOnCPU(**arguments)


class Clock(pl.Callback):
    """Seconds of the updates after the first, which warms up."""

    def __init__(self) -> None:
        self.start, self.updates = 0.0, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start after the first update."""
        if trainer.global_step == 1 and not self.start:
            self.start = time.perf_counter()
        self.updates = trainer.global_step - 1


def fit(config: DictConfig, rank: int, ranks: int) -> tuple[float, float, str]:
    """Seconds per update, last loss, and a note; by Lightning."""
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu" if CPU else "gpu",
        devices=ranks,
        strategy=strategy_of(config),
        precision="32-true" if CPU else "bf16-mixed",
        max_steps=config.steps,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(ByteModel(config), loader(config, rank, ranks))
    return (time.perf_counter() - clock.start) / clock.updates, float(trainer.callback_metrics["loss"]), ""


def fit_fsdp2(config: DictConfig, rank: int, ranks: int) -> tuple[float, float, str]:
    """The same model and data under torch's FSDP2: Lightning refuses FSDP without a GPU."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    model = ByteModel(config)
    model.configure_model()
    net: Any = model.net
    for block in [*net, net]:
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.lr)
    rows = list(loader(config, rank, ranks))
    start, loss = 0.0, torch.zeros(())
    for step in range(config.steps):
        for batch in rows[step * config.accumulate : (step + 1) * config.accumulate]:
            logits = net(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / config.accumulate).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        start = start or time.perf_counter()
    seconds = (time.perf_counter() - start) / (config.steps - 1)
    loss = loss.detach()
    torch.distributed.all_reduce(loss)
    torch.distributed.destroy_process_group()
    return seconds, float(loss) / ranks, "torch's FSDP2 directly: Lightning refuses FSDP without a GPU"


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    """Train, and write the row of the table."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    run = fit_fsdp2 if config.strategy.kind == "fsdp" and CPU else fit
    seconds, loss, note = run(config, rank, ranks)
    if CPU:
        import resource

        peak, memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "host"
    else:
        peak, memory = torch.cuda.max_memory_allocated(), "device"
    row = {
        "strategy": config.strategy.name,
        "samples/s": round(config.micro * config.accumulate * ranks / seconds, 1),
        f"peak {memory} MiB per rank": round(peak / 2**20),
        "loss": round(loss, 4),
        "note": note,
    }
    if rank == 0:
        print(json.dumps(row))
        if config.result:
            Path(config.result).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
