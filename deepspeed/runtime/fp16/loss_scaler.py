"""Old address of the loss scalers."""

from __future__ import annotations

from deepspeed.optim.loss_scale import (
    CONSECUTIVE_HYSTERESIS,
    DELAYED_SHIFT,
    INITIAL_LOSS_SCALE,
    MIN_LOSS_SCALE,
    SCALE_WINDOW,
    CreateLossScaler,
    DynamicLossScaler,
    LossScaler,
)

__all__ = [
    "CONSECUTIVE_HYSTERESIS",
    "CreateLossScaler",
    "DELAYED_SHIFT",
    "DynamicLossScaler",
    "INITIAL_LOSS_SCALE",
    "LossScaler",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
]
