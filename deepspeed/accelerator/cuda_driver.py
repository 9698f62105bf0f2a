"""The CUDA driver's own interface, for kernels that lie compiled in files."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from deepspeed.errors import NotAvailableError, UsageError

PLAIN_SHARED = 48 << 10  # bytes of shared memory that a program may have without being asked for
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def compute_capability(device: torch.device | None = None) -> tuple[int, int]:
    """Return the compute capability of a CUDA device (None: the current one), such as (9, 0)."""
    return torch.cuda.get_device_capability(device)


class CudaDriver:
    """The driver of this machine, for one device. Tests use a fake one.

    Args:
        device: CUDA device of the kernels; None: the current one of each call.

    Raises:
        NotAvailableError: libcuda is missing.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = None if device is None else device.index
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotAvailableError(f"compiled kernels need the CUDA driver: {error}") from error

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {code}"
            raise UsageError(f"{name} of the CUDA driver: {reason}")

    def load(self, code: bytes, function: str, shared: int) -> Any:
        """Load machine code on the device and return its function, which may use `shared` bytes.

        Raises:
            UsageError: the driver refuses it; the message has its reason.
        """
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.zeros(1, device="cuda")  # this thread has a context then
            self._call("cuModuleLoadData", ctypes.byref(module), code)
            self._call("cuModuleGetFunction", ctypes.byref(handle), module, function.encode())
            if shared > PLAIN_SHARED:
                self._call("cuFuncSetAttribute", handle, _DYNAMIC_SHARED, shared)
        return handle

    def launch(self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, words: list[int]) -> None:
        """Launch a function on the device's current stream, without waiting for it.

        Args:
            function: result of `load`.
            grid: number of programs by axis.
            threads: threads of a program.
            shared: bytes of shared memory of a program.
            words: the function's arguments, each in 8 bytes.

        Raises:
            UsageError: the driver refuses it; the message has its reason.
        """
        count = len(words)
        values = (ctypes.c_uint64 * count)(*words)
        first = ctypes.addressof(values)
        addresses = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        with contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared, stream, addresses, None)
