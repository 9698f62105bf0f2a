"""Lightning's Trainer and Fabric, with and without this package; on CPU with thin subclasses of the strategies."""

from __future__ import annotations

from typing import Any

import torch

from tests.clients.common import ACCUMULATION, CLIP, MICRO, RATE, Run, Words, falling, fresh_clients, sentences, zero

MIXED = {"fp32": "32-true", "bf16": "bf16-mixed"}


def on_cpu(strategy: type) -> type:
    """The strategy without its demand for CUDA."""

    class OnCPU(strategy):
        def setup_environment(self) -> None:
            super(strategy, self).setup_environment()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", self.local_rank)

    return OnCPU


def _no_device_check(module: Any) -> None:
    module._validate_device_index_selection = lambda devices: None


def trainer_strategy(stage: int | None, **values: Any) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
    from lightning.pytorch.strategies import deepspeed as home

    _no_device_check(home)
    return DDPStrategy() if stage is None else on_cpu(DeepSpeedStrategy)(stage=stage, **values)


def strategy_named(name: str, folder: str) -> Any:
    """What Lightning makes of a strategy's name, without the demand for CUDA; `nvme` is the class with all arguments.

    Args:
        name: as in `Trainer(strategy=name)`.
        folder: stands for the NVMe drive.
    """
    from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

    if name == "nvme":
        return trainer_strategy(
            3,
            offload_optimizer=True,
            offload_parameters=True,
            remote_device="nvme",
            offload_params_device="nvme",
            offload_optimizer_device="nvme",
            nvme_path=folder,
            params_buffer_count=4,
            params_buffer_size=1_000_000,
            max_in_cpu=1_000_000,
            optimizer_buffer_count=5,
            block_size=65536,
            queue_depth=4,
            single_submit=True,
            overlap_events=False,
            thread_count=2,
        )
    trainer_strategy(None)
    entry = StrategyRegistry[name]
    if entry["strategy"] is DeepSpeedStrategy:
        entry["strategy"] = on_cpu(DeepSpeedStrategy)
    return name


def lightning_module(run: Run, sharded: bool) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None
            if not sharded:
                self.configure_model()

        def configure_model(self) -> None:
            if self.net is None:
                self.net = Words()

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(tokens)
            run.losses.append(loss.item())
            run.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
            return loss

        def validation_step(self, tokens: torch.Tensor, index: int) -> None:
            self.log("loss", self.net(tokens), sync_dist=True)

        test_step = validation_step

        def predict_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(tokens)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling(optimizer), "interval": "step"}}

    return Module()


def make_trainer(strategy: Any, precision: str, folder: str, **more: Any) -> Any:
    import lightning.pytorch as pl

    quiet = dict.fromkeys(["enable_progress_bar", "logger", "enable_checkpointing", "enable_model_summary"], False)
    return pl.Trainer(
        devices=torch.distributed.get_world_size(),
        strategy=strategy,
        precision=MIXED[precision],  # type: ignore[arg-type]
        gradient_clip_val=CLIP,
        default_root_dir=folder,
        **quiet | {"accelerator": "cpu", "max_epochs": 1, "accumulate_grad_batches": ACCUMULATION} | more,  # type: ignore[arg-type]
    )


def batches() -> Any:
    ranks = torch.distributed.get_world_size()
    return torch.utils.data.DataLoader(sentences(40 * ranks), batch_size=MICRO)


def train(stage: int | None, precision: str) -> Run:
    return fitted(stage, precision, trainer_strategy(stage))


def fitted(stage: int | None, precision: str, strategy: Any, **more: Any) -> Run:
    """One epoch of the Trainer."""
    run = Run()
    with fresh_clients() as folder:
        trainer = make_trainer(strategy, precision, folder, **more)
        module = lightning_module(run, sharded=stage is not None)
        trainer.fit(module, batches())
        run.updates = trainer.global_step
        if stage is not None:
            assert trainer.strategy.model.global_steps == run.updates
            trainer.strategy.model.destroy()
    return run


def fabric_parts(stage: int | None, precision: str, name: str | None = None) -> Any:
    """Fabric, the model, optimizer and loader that it has set up, and a schedule.

    Args:
        stage: None: without DeepSpeed.
        precision: a key of MIXED.
        name: a strategy's name, to be used as it is.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy, DeepSpeedStrategy
    from lightning.fabric.strategies import deepspeed as home

    _no_device_check(home)
    strategy: Any = DDPStrategy()
    if name is not None:
        strategy = name
        if STRATEGY_REGISTRY[name]["strategy"] is DeepSpeedStrategy:
            STRATEGY_REGISTRY[name]["strategy"] = on_cpu(DeepSpeedStrategy)
    elif stage is not None:
        strategy = on_cpu(DeepSpeedStrategy)(
            config={
                "zero_optimization": zero(stage),
                "train_micro_batch_size_per_gpu": MICRO,
                "gradient_accumulation_steps": ACCUMULATION,
                "gradient_clipping": CLIP,
            }
        )
    ranks = torch.distributed.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision=MIXED[precision])  # type: ignore[arg-type]
    fabric.launch()
    with fabric.init_module():
        model: Any = Words()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = falling(optimizer)  # torch's schedules take torch's optimizers only; the groups are shared
    model, optimizer = fabric.setup(model, optimizer)
    return fabric, model, optimizer, fabric.setup_dataloaders(batches()), schedule


def fabric_steps(fabric: Any, model: Any, optimizer: Any, schedule: Any, tokens: Any) -> Run:
    run = Run()
    engine = type(fabric.strategy).__name__ == "OnCPU"
    for index, batch in enumerate(tokens):
        loss = model(batch)
        fabric.backward(loss if engine else loss / ACCUMULATION)  # the engine divides
        run.losses.append(loss.item())
        if (index + 1) % ACCUMULATION == 0:
            if not engine:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.updates += 1
        run.rates.append(optimizer.param_groups[0]["lr"])
    return run


def fabric_train(stage: int | None, precision: str) -> Run:
    with fresh_clients():
        fabric, model, optimizer, loader, schedule = fabric_parts(stage, precision)
        run = fabric_steps(fabric, model, optimizer, schedule, loader)
        if stage is not None:
            model._forward_module.destroy()
    return run
