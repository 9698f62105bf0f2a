"""Old address of the typed section of ZeRO."""

from __future__ import annotations

from deepspeed.config.sections.zero import Zero as DeepSpeedZeroConfig
from deepspeed.config.sections.zero import ZeroStageEnum, get_zero_config

__all__ = ["DeepSpeedZeroConfig", "ZeroStageEnum", "get_zero_config"]
