"""Old address of the typed section of modules that are fetched as one unit."""

from __future__ import annotations

from deepspeed.config.sections.zero import LeafModule as DeepSpeedZeroLeafModuleConfig

__all__ = ["DeepSpeedZeroLeafModuleConfig"]
