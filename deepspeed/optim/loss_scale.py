"""The loss scale of fp16: fixed, or dynamic with overflows."""

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
    """A fixed loss scale; an overflow only skips the step."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        """Set the scale.

        Args:
            scale: factor on the loss (`fp16.loss_scale`).
        """
        self.scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The scale, under the name that clients read."""
        return self.scale

    @property
    def cur_scale(self) -> float:
        """The scale, under another name that clients read."""
        return self.scale

    def update(self, overflow: bool) -> None:
        """Take note of one step's outcome; `overflow`: its gradients were not finite and it was skipped."""

    def state_dict(self) -> dict[str, Any]:
        """The scale and what decides its next change."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])


class DynamicLossScaler(LossScaler):
    """A loss scale that is divided after overflows and multiplied after a window of steps without overflow."""

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
            scale_factor: what the scale is divided or multiplied by.
            scale_window: clean steps before it grows (`fp16.loss_scale_window`).
            min_scale: the smallest scale (`fp16.min_loss_scale`).
            delayed_shift: overflows before it shrinks, the hysteresis (`fp16.hysteresis`).
            consecutive_hysteresis: a clean step forgives the overflows before it (`fp16.consecutive_hysteresis`).
            raise_error_at_min_scale: an overflow at the smallest scale is an error.
            dtype: compute dtype, for the error's text.
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
        """Shrink or grow the scale after one step.

        Raises:
            LossScaleError: it overflowed at the smallest scale.
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
        """Take over a `state_dict()`; one of a fixed scale starts the counts anew."""
        super().load_state_dict(state)
        self.hysteresis_left = state.get("hysteresis_left", self.delayed_shift)
        self.clean_steps = state.get("clean_steps", 0)


def CreateLossScaler(  # noqa: N802 - the interface's name
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScaler:
    """A scaler for a compute dtype: dynamic or fixed for fp16, one for every other dtype.

    Args:
        dtype: compute dtype.
        static_loss_scale: the fixed scale.
        dynamic_scaling: follow overflows instead.
        dynamic_loss_args: arguments of `DynamicLossScaler` under the constants of this module.

    Returns:
        The scaler.
    """
    if dtype != torch.float16:
        return LossScaler(1.0)
    if dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale)


def from_config(fp16: FP16) -> LossScaler:
    """The scaler of the `fp16` section (`loss_scale` 0 is dynamic); a scale of one when it is off."""
    args = {
        INITIAL_LOSS_SCALE: 2.0**fp16.initial_scale_power,
        SCALE_WINDOW: fp16.loss_scale_window,
        DELAYED_SHIFT: fp16.hysteresis,
        CONSECUTIVE_HYSTERESIS: fp16.consecutive_hysteresis,
        MIN_LOSS_SCALE: fp16.min_loss_scale,
    }
    dtype = torch.float16 if fp16.enabled else torch.float32
    return CreateLossScaler(dtype, fp16.loss_scale, fp16.loss_scale == 0, args)
