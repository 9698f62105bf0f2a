"""Placeholders of optimizer state in another tier."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from deepspeed.zero.optimizer.state_tensor import Away


def test_a_move_keeps_the_placeholder_and_a_cast_gives_values() -> None:
    values = torch.arange(4.0)
    state = Away.of(values, lambda _written: nullcontext(values))
    for moved in (state.to("cpu"), state.to(torch.float32), state.to("meta", non_blocking=True), state.to(values)):
        assert moved is state
    assert state.cpu() is state and state.cuda(0) is state
    for cast in (state.to(torch.float16), state.to("cpu", dtype=torch.float16), state.to(values.half()), state.half()):
        assert type(cast) is torch.Tensor and torch.equal(cast, values.half())
    for copied in (state.to("cpu", copy=True), state.to(copy=True, device="cpu")):
        assert type(copied) is torch.Tensor and torch.equal(copied, values)
    assert state.to("cpu", copy=False) is state
