"""Old address of the kinds and places of state that can be moved."""

from __future__ import annotations

from deepspeed.engine.offload_states import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
