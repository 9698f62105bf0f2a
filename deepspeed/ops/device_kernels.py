"""Operators that a device has one kernel for and the CPU runs in pieces: what these keep for backward is more."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

_ONE_KERNEL = ("_fused_rms_norm", "_fused_rms_norm_backward")


@contextlib.contextmanager
def device_kernels() -> Generator[None]:
    """Inside, the CPU's tensors stay in one piece there too; only where operators have no values (`Valueless`)."""
    library = torch.library.Library("aten", "IMPL")
    for name in _ONE_KERNEL:
        library.impl(name, _without_values, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _without_values(*_args: Any, **_kwargs: Any) -> Any:
    return NotImplemented
