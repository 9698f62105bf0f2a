"""CRC-32 of tensors, the one of zlib: by the native library where that is faster."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable

import torch

from deepspeed.native import library


def crc32(data: torch.Tensor) -> int:
    """The CRC-32 of some bytes.

    Args:
        data: 1-D, uint8, contiguous, on the CPU.
    """
    native = _native()
    return zlib.crc32(data.numpy().data) if native is None else native(data.data_ptr(), data.numel())


@functools.cache
def _native() -> Callable[[int, int], int] | None:
    loaded = library()
    if loaded is None or not loaded.ds_crc32_is_fast():
        return None
    function = loaded.ds_crc32
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_uint64], ctypes.c_uint32
    return function
