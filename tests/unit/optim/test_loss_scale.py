"""The fixed and the dynamic loss scale."""

from __future__ import annotations

import pytest
import torch

from deepspeed.config.sections.precision import FP16
from deepspeed.errors import LossScaleError
from deepspeed.optim.loss_scale import CreateLossScaler, DynamicLossScaler, LossScaler, from_config


def scales(scaler: LossScaler, outcomes: str) -> list[float]:
    """The scale after each step of a string of "." (clean) and "x" (overflow)."""
    made = []
    for outcome in outcomes:
        scaler.update(outcome == "x")
        made.append(scaler.scale)
    return made


def test_fixed_scale_never_moves() -> None:
    scaler = LossScaler(8)
    assert not scaler.dynamic
    assert scales(scaler, "x.x...") == [8.0] * 6
    assert scaler.loss_scale == scaler.cur_scale == scaler.scale


def test_shrinks_at_each_overflow_and_grows_after_a_window() -> None:
    scaler = DynamicLossScaler(16, scale_window=3)
    assert scaler.dynamic
    assert scales(scaler, "xx...x......") == [8, 4, 4, 4, 8, 4, 4, 4, 8, 8, 8, 16]


def test_hysteresis_is_refilled_by_growth() -> None:
    scaler = DynamicLossScaler(16, scale_window=2, delayed_shift=2)
    assert scales(scaler, "xx.x..xx") == [16, 8, 8, 4, 4, 8, 8, 4]


def test_consecutive_hysteresis_is_refilled_by_any_clean_step() -> None:
    scaler = DynamicLossScaler(16, scale_window=100, delayed_shift=2, consecutive_hysteresis=True)
    assert scales(scaler, "x.x.xx") == [16, 16, 16, 16, 16, 8]


def test_overflow_at_the_minimum() -> None:
    scaler = DynamicLossScaler(3, min_scale=1)
    assert scales(scaler, "xx") == [1.5, 1]
    with pytest.raises(LossScaleError, match=r"already at its minimum, 1.*bf16"):
        scaler.update(True)
    assert scales(DynamicLossScaler(2, raise_error_at_min_scale=False), "xxx") == [1, 1, 1]


def test_state_resumes() -> None:
    first = DynamicLossScaler(16, scale_window=3, delayed_shift=2)
    scales(first, "x..")
    second = DynamicLossScaler(1, scale_window=3, delayed_shift=2)
    second.load_state_dict(first.state_dict())
    assert scales(second, ".xx.") == scales(first, ".xx.") == [32, 32, 16, 16]
    second.load_state_dict(LossScaler(4).state_dict())
    assert scales(second, "xx") == [4, 2]


def test_from_config() -> None:
    assert from_config(FP16(enabled=False)).state_dict() == {"scale": 1.0}
    fixed = from_config(FP16(enabled=True, loss_scale=128))
    assert not fixed.dynamic and fixed.scale == 128
    made = from_config(FP16(enabled=True, initial_scale_power=4, loss_scale_window=7, hysteresis=3, min_loss_scale=2))
    assert isinstance(made, DynamicLossScaler)
    assert (made.scale, made.scale_window, made.delayed_shift, made.min_scale) == (16, 7, 3, 2)


def test_other_dtypes_are_not_scaled() -> None:
    assert CreateLossScaler(torch.bfloat16, 64.0, True, None).scale == 1.0
