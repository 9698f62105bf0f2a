"""Old address of the typed sections of offload, and of the kinds and places of state that can be moved."""

from __future__ import annotations

from deepspeed.config.sections.zero import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.config.sections.zero import OffloadParam as DeepSpeedZeroOffloadParamConfig
from deepspeed.engine.offload_states import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
