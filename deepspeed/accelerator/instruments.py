"""Tools for the current device: memory figures, emptying of the cache, profiler ranges and timers."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.foundation import timer
from deepspeed.foundation.log import log_dist, log_rank0
from deepspeed.foundation.timer import ThroughputMeter

Function = TypeVar("Function", bound=Callable[..., Any])
GB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log device and host memory in GiB on rank 0 after a garbage collection, and reset the peaks.

    MA is device memory allocated to tensors, CA is device memory reserved by torch. On a CPU both are the resident
    set, whose peak is not reset.

    Args:
        message: text for the log line, such as the position in the script.
        force: False: do nothing, so that the call can stay in the script.
    """
    if not force:
        return
    gc.collect()
    device, host = get_accelerator(), psutil.virtual_memory()
    log_rank0(
        f"{message}\nMA {device.memory_allocated() / GB:.2f} GB  Max_MA {device.max_memory_allocated() / GB:.2f} GB  "
        f"CA {device.memory_reserved() / GB:.2f} GB  Max_CA {device.max_memory_reserved() / GB:.2f} GB\n"
        f"CPU Virtual Memory:  used = {host.used / GB:.2f} GB, percent = {host.percent}%"
    )
    device.reset_peak_memory_stats()


def get_ma_status() -> int:
    """Return the device memory that tensors occupy, in bytes."""
    return get_accelerator().memory_allocated()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log the current and the peak device memory that tensors occupy.

    Args:
        msg: text for the log line, such as the position in the script.
        print_rank: the rank that logs; -1: all ranks.
        reset_max: whether to reset the peak; impossible on a CPU.
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
    """Release to the device the memory that torch has reserved but not allocated."""
    get_accelerator().empty_cache()


def instrument_w_nvtx(func: Function) -> Function:
    """Record every call of `func` as a range of the device trace (NVTX on CUDA, no effect on a CPU)."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return ranged  # type: ignore[return-value]


class SynchronizedWallClockTimer(timer.HostWallClockTimer):
    """Named timers that synchronize asynchronous devices at each reading: `timers("forward").start()`."""

    def __init__(self) -> None:
        super().__init__(get_accelerator().synchronize)

    @staticmethod
    def memory_usage() -> str:
        """Return one line with the current and peak device memory of tensors and of torch's cache."""
        device = get_accelerator()
        allocated, reserved = device.memory_allocated(), device.memory_reserved()
        max_allocated, max_reserved = device.max_memory_allocated(), device.max_memory_reserved()
        return (
            f"mem_allocated: {allocated / GB:.4f} GB | max_mem_allocated: {max_allocated / GB:.4f} GB | "
            f"cache_allocated: {reserved / GB:.4f} GB | max_cache_allocated: {max_reserved / GB:.4f} GB"
        )


class ThroughputTimer(ThroughputMeter):
    """Timer of samples per second over all ranks.

    Args:
        config: the `timers.throughput` section: `enabled`, and `synchronized` (synchronize the device at each reading).
        batch_size: samples of one global step, over all ranks.
        start_step: number of warm-up steps that are not measured.
        steps_per_output: global steps between two log lines; None or 0: no log lines.
        monitor_memory: add the host's memory to each log line.
        logging_fn: function that receives each log line; None: log on rank 0.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], Any] | None = None,
    ) -> None:
        wait = get_accelerator().synchronize if config.synchronized else None
        super().__init__(batch_size, start_step, steps_per_output, wait, config.enabled)
        self.config, self.monitor_memory, self.logging = config, monitor_memory, logging_fn or log_rank0

    def say(self, now: float) -> None:
        device = get_accelerator()
        held, most = device.memory_allocated() / GB, device.max_memory_allocated() / GB
        line = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.2f}, CurrSamplesPerSec={now:.2f}, "
            f"MemAllocated={held:.2f}GB, MaxMemAllocated={most:.2f}GB"
        )
        host = psutil.virtual_memory()
        self.logging(line + (f", host {host.used / GB:.2f}GB of {host.total / GB:.2f}GB" * self.monitor_memory))
