"""Old address of the data loaders."""

from __future__ import annotations

from deepspeed.engine.dataloader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
