"""Old address of what gathers and frees sharded parameters."""

from __future__ import annotations

from deepspeed.zero.parameters.module_hooks import ModuleHooks as DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
