"""Static and dynamic loss scaling for fp16 (Micikevicius et al., 2018)."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.config.sections.precision import FP16
from deepspeed.errors import LossScaleError

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScaler:
    """Static loss scale; after an overflow, the engine skips the step but keeps the scale."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        """Set the scale, the factor on the loss (`fp16.loss_scale`)."""
        self.scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """Return the scale; alias of `scale`."""
        return self.scale

    @property
    def cur_scale(self) -> float:
        """Return the scale; alias of `scale`."""
        return self.scale

    def update(self, overflow: bool) -> None:
        """Do nothing, since the scale is static. `overflow`: whether gradients were not finite."""

    def state_dict(self) -> dict[str, Any]:
        """Return the scale; for a dynamic scale, also the counters that determine its next change."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])


class DynamicLossScaler(LossScaler):
    """Dynamic loss scale, which decreases after overflows and increases after a window of steps without overflow."""

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        """Set the scale and its rules.

        Args:
            init_scale: the first scale (2 ** `fp16.initial_scale_power`).
            scale_factor: factor of each decrease or increase.
            scale_window: steps without overflow before an increase (`fp16.loss_scale_window`).
            min_scale: the smallest scale (`fp16.min_loss_scale`).
            delayed_shift: number of overflows until the first decrease, the hysteresis (`fp16.hysteresis`).
            consecutive_hysteresis: reset the hysteresis after every step without overflow, not only at an increase.
            raise_error_at_min_scale: raise LossScaleError on an overflow at the smallest scale; False: keep the scale.
            dtype: compute dtype, for the error message.
        """
        super().__init__(init_scale)
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype
        self.hysteresis_left = delayed_shift
        self.clean_steps = 0

    def update(self, overflow: bool) -> None:
        """Decrease or increase the scale after a step.

        Args:
            overflow: whether gradients were not finite, so that the step was skipped.

        Raises:
            LossScaleError: gradients overflowed at the smallest scale, and `raise_error_at_min_scale` is set.
        """
        if overflow:
            self.clean_steps = 0
            if self.hysteresis_left > 1:
                self.hysteresis_left -= 1
            else:
                self._shrink()
            return
        self.clean_steps += 1
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.delayed_shift
        if self.clean_steps % self.scale_window == 0:
            self.hysteresis_left = self.delayed_shift
            self.scale *= self.scale_factor

    def _shrink(self) -> None:
        if self.scale <= self.min_scale and self.raise_error_at_min_scale:
            raise LossScaleError(
                f"gradients overflow {self.dtype} with the loss scale already at its minimum, {self.min_scale}. The "
                "model itself produces inf or nan: look at the first non-finite parameter reported above, lower the "
                "learning rate, or train in bf16 (models pretrained in bf16 often exceed the range of fp16); "
                "fp16.min_loss_scale sets the minimum"
            )
        self.scale = max(self.scale / self.scale_factor, self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "hysteresis_left": self.hysteresis_left, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`; a state dict of a static scale resets the counters."""
        super().load_state_dict(state)
        self.hysteresis_left = state.get("hysteresis_left", self.delayed_shift)
        self.clean_steps = state.get("clean_steps", 0)


def CreateLossScaler(  # noqa: N802 - the interface's name
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScaler:
    """Create a loss scaler for a compute dtype: dynamic or static for fp16, a scale of 1 for other dtypes.

    Args:
        dtype: compute dtype.
        static_loss_scale: the static scale.
        dynamic_scaling: use a dynamic scale instead.
        dynamic_loss_args: arguments of `DynamicLossScaler`, with this module's constants as keys; None: defaults.

    Returns:
        The scaler.
    """
    if dtype != torch.float16:
        return LossScaler(1.0)
    if dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale)


def from_config(fp16: FP16) -> LossScaler:
    """Create the scaler of the `fp16` section (`loss_scale` 0: dynamic); if the section is off, a scale of 1."""
    args = {
        INITIAL_LOSS_SCALE: 2.0**fp16.initial_scale_power,
        SCALE_WINDOW: fp16.loss_scale_window,
        DELAYED_SHIFT: fp16.hysteresis,
        CONSECUTIVE_HYSTERESIS: fp16.consecutive_hysteresis,
        MIN_LOSS_SCALE: fp16.min_loss_scale,
    }
    dtype = torch.float16 if fp16.enabled else torch.float32
    return CreateLossScaler(dtype, fp16.loss_scale, fp16.loss_scale == 0, args)
