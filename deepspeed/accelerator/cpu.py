"""CPU as an accelerator: one device, no page locking, no graphs, always synchronized."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator.base import Accelerator


class CpuAccelerator(Accelerator):
    """CPU accelerator. Allocated memory is the process's resident set; total and available memory are the machine's."""

    name = "cpu"
    torch_module = torch.cpu
    passed = frozenset({"Event", "Stream", "current_stream", "stream", "synchronize"})
    facts = {
        "communication_backend_name": "gloo",
        "create_graph": None,
        "current_device": 0,
        "device_count": 1,
        "export_envs": ["LD_LIBRARY_PATH", "PATH"],
        "handles_memory_backpressure": True,
        "is_available": True,
        "is_bf16_supported": True,
        "is_fp16_fast": False,
        "is_fp16_supported": True,
        "is_synchronized_device": True,
        "is_triton_supported": False,
        "range_pop": None,
        "range_push": None,
        "replay_graph": None,
        "reset_max_memory_allocated": None,
        "reset_max_memory_cached": None,
        "reset_max_memory_reserved": None,
        "reset_peak_memory_stats": None,
        "resolves_data_dependency": True,
        "set_device": None,
        "supported_dtypes": [torch.float32, torch.bfloat16, torch.float16],
        "use_host_timers": True,
        "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
    }

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu" for any index, since there is one device."""
        return "cpu"

    def empty_cache(self) -> None:
        """Release to the system the freed memory that the C library caches (glibc only)."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def is_bf16_fast(self) -> bool:
        """Return whether this CPU multiplies bf16 in hardware."""
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the default stream; the CPU has only one."""
        return torch.cpu.current_stream()

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return torch's generator for the CPU."""
        return torch.default_generator

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of the generator, a uint8 tensor."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Return the seed that the generator was last seeded with."""
        return torch.initial_seed()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident set of this process, in bytes."""
        import psutil

        return psutil.Process().memory_info().rss

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak resident set of this process, in bytes; the peak cannot be reset."""
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Return the current and peak resident set under torch's names for device memory."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the machine's memory, in bytes."""
        import psutil

        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the memory that the machine can allocate without swapping, in bytes."""
        import psutil

        return psutil.virtual_memory().available

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return `tensor` unchanged: without a device, page locking has no benefit."""
        return tensor

    def lock_pages(self, tensor: torch.Tensor) -> None:
        """Do nothing: without a device, page locking has no benefit."""

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call `callback` at once, since no device has to be initialized."""
        callback()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None, error_mode: str = "global"
    ) -> AbstractContextManager[None]:
        """Return a context without effect: the CPU has no graphs."""
        return nullcontext()
