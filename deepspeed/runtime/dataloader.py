"""Old address of the data loaders."""

from __future__ import annotations

from deepspeed.engine.data_loading import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
