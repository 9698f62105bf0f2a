"""Old address of the engine."""

from __future__ import annotations

from deepspeed.engine.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
