"""Old address of the typed section of activation checkpointing."""

from __future__ import annotations

from deepspeed.config.sections.memory import ActivationCheckpointing as DeepSpeedActivationCheckpointingConfig

__all__ = ["DeepSpeedActivationCheckpointingConfig"]
