"""The CPU as an accelerator: one device, no page locking, no graphs, and always synchronized."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.accelerator.base import Accelerator


class CpuAccelerator(Accelerator):
    """Allocated memory is the resident set of this process, total and available memory are the machine's; in bytes."""

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
        """Always "cpu": there is one device, whatever the index."""
        return "cpu"

    def empty_cache(self) -> None:
        """Return to the system the freed memory that the C library still holds (glibc; no effect elsewhere)."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def is_bf16_fast(self) -> bool:
        """Whether this CPU multiplies bf16 in hardware."""
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

    def default_stream(self, device_index: int | None = None) -> Any:
        """The one stream there is."""
        return torch.cpu.current_stream()

    def default_generator(self, device_index: int) -> torch.Generator:
        """torch's generator for the CPU."""
        return torch.default_generator

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the generator, a uint8 tensor."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The seed last given to the generator."""
        return torch.initial_seed()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Resident set of this process, in bytes."""
        import psutil

        return psutil.Process().memory_info().rss

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Largest resident set this process has had, in bytes; it cannot be reset."""
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Current and largest resident set under the names torch uses on devices."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the machine, in bytes."""
        import psutil

        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        """Memory that the machine can still give without swapping, in bytes."""
        import psutil

        return psutil.virtual_memory().available

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """`tensor` itself: no device copies from it, so locking its pages gains nothing."""
        return tensor

    def lock_pages(self, tensor: torch.Tensor) -> None:
        """Nothing is locked, for the same reason."""

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call at once: there is no device to wait for."""
        callback()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[None]:
        """Run the block as it is: the CPU records no graphs."""
        return nullcontext()
