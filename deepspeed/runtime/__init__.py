"""Old addresses of the engine, ZeRO, schedules and the configuration; clients reach them as attributes too."""

from __future__ import annotations

from deepspeed.runtime import (
    activation_checkpointing,
    base_optimizer,
    bf16_optimizer,
    config,
    config_utils,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    precision_config,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "bf16_optimizer",
    "config",
    "config_utils",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "precision_config",
    "utils",
    "zero",
]
