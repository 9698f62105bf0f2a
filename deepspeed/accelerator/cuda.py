"""CUDA devices: most methods forward to torch.cuda."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from deepspeed.accelerator.base import Accelerator


class CudaAccelerator(Accelerator):
    """CUDA devices visible to this process. Creating the object creates no CUDA context."""

    name = "cuda"
    torch_module = torch.cuda
    passed = frozenset(
        {
            "Event",
            "Stream",
            "current_device",
            "current_stream",
            "default_stream",
            "device_count",
            "empty_cache",
            "initial_seed",
            "is_available",
            "is_bf16_supported",
            "manual_seed",
            "manual_seed_all",
            "max_memory_allocated",
            "max_memory_cached",
            "max_memory_reserved",
            "memory_allocated",
            "memory_cached",
            "memory_reserved",
            "memory_stats",
            "reset_max_memory_allocated",
            "reset_max_memory_cached",
            "reset_peak_memory_stats",
            "set_device",
            "stream",
            "synchronize",
        }
    )
    facts = {
        "communication_backend_name": "nccl",
        "export_envs": ["NCCL", "LD_LIBRARY_PATH", "PATH"],
        "handles_memory_backpressure": False,
        "is_fp16_fast": True,
        "is_fp16_supported": True,
        "is_synchronized_device": False,
        "resolves_data_dependency": False,
        "use_host_timers": False,
        "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
    }

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model can compute in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_bf16_fast(self) -> bool:
        """Return whether the current device multiplies bf16 in hardware (compute capability 8 and later)."""
        return torch.cuda.get_device_capability()[0] >= 8

    def is_triton_supported(self) -> bool:
        """Return whether triton generates code for the current device (compute capability 7 and later)."""
        return torch.cuda.get_device_capability()[0] >= 7

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return torch's generator for the device with that index."""
        return torch.cuda.default_generators[device_index]

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the RNG state of a device, a uint8 tensor; None: the current device."""
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of a device, in bytes; None: the current device."""
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes free on a device (None: the current one), plus those reserved by torch but not allocated."""
        held = torch.cuda.memory_reserved(device_index) - torch.cuda.memory_allocated(device_index)
        return torch.cuda.mem_get_info(device_index)[0] + held

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a page-locked copy of a host tensor, or the tensor if page-locked; `align_bytes` has no effect."""
        return tensor.pin_memory()

    def lock_pages(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Page-lock a host tensor in place; returns a function that unlocks it, to call before the memory is freed.

        Raises:
            RuntimeError: CUDA cannot lock the pages, for example because the system does not allow so many.
        """
        runtime: Any = torch.cuda.cudart()
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if status != runtime.cudaError.success:
            with suppress(RuntimeError):
                torch.zeros(1, device=self.name)  # clears the error, which the next kernel would report
        torch.cuda.check_error(status)
        return partial(runtime.cudaHostUnregister, tensor.data_ptr())

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call `callback` when CUDA is initialized, or at once if it already is."""
        torch.cuda._lazy_call(callback)

    def range_push(self, msg: str) -> None:
        """Open an NVTX range with the name `msg`."""
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """Close the innermost NVTX range."""
        torch.cuda.nvtx.range_pop()

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    @contextmanager
    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None, error_mode: str = "global"
    ) -> Iterator[None]:
        """Context that records operations into `graph`; other arguments as in `torch.cuda.graph`.

        If the capture fails, the current stream is the one from before; torch leaves that of the capture.
        """
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode)
        with torch.cuda.stream(torch.cuda.current_stream()), recording:
            yield

    def replay_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()
