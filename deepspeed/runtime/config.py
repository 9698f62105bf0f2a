"""Old address of the configuration."""

from __future__ import annotations

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
