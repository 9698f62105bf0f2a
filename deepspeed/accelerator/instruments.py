"""What a user sees of the device: memory figures, an emptied cache, functions as ranges of a device trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.foundation.log import log_dist, say

Function = TypeVar("Function", bound=Callable[..., Any])
GB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what the device and the host hold.

    Args:
        message: where in the script this is.
        force: log; False makes the call cost nothing, so that it may stay in the script.
    """
    if not force:
        return
    device, host = get_accelerator(), psutil.virtual_memory()
    say(
        f"{message} | device: allocated {device.memory_allocated() / GB:.2f} GB, highest "
        f"{device.max_memory_allocated() / GB:.2f} GB, reserved {device.memory_reserved() / GB:.2f} GB | "
        f"host: used {host.used / GB:.2f} GB of {host.total / GB:.2f} GB"
    )


def get_ma_status() -> int:
    """Bytes that tensors hold on the device."""
    return get_accelerator().memory_allocated()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log what the device holds.

    Args:
        msg: where in the script this is.
        print_rank: the rank that logs; -1: all of them.
        reset_max: count the highest figure anew from here on.
    """
    device = get_accelerator()
    log_dist(
        f"{msg} | device: allocated {device.memory_allocated() / GB:.2f} GB, highest "
        f"{device.max_memory_allocated() / GB:.2f} GB",
        ranks=[print_rank],
    )
    if reset_max:
        device.reset_peak_memory_stats()


def empty_cache() -> None:
    """Give memory that torch holds but does not use back to the device."""
    get_accelerator().empty_cache()


def instrument_w_nvtx(func: Function) -> Function:
    """Show every call of `func` as a range of the device trace (NVTX on CUDA, nothing elsewhere)."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return ranged  # type: ignore[return-value]
