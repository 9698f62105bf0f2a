"""The global gradient norm and the factor that clips it."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence

import torch

from deepspeed.native import KINDS, library, threads

# Elements converted to double at once: they stay in the second-level cache.
_CHUNK = 1 << 16


def sum_of_squares(flat: torch.Tensor, exact: bool) -> torch.Tensor:
    """The sum of squares as a 0-d float64 tensor; it is finite exactly when every element is.

    Args:
        flat: 1-D, any floating dtype.
        exact: form squares and sums in float64, so that the result does not depend on how parameters were cut into
            slices and buckets (needed when clipping feeds it back); else float32 will do, where it is faster.
    """
    total = native_sums_of_squares([flat])
    if total is not None:
        return torch.tensor(total[0], dtype=torch.float64)
    if flat.device.type != "cpu":
        # One pass over memory in either width, and float32 squares of finite gradients may overflow.
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    quick = None if exact else torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
    # A float32 sum overflows where squares are large, and that is no overflow of the gradients.
    return quick if quick is not None and quick.isfinite() else _in_chunks(flat)


def native_sums_of_squares(flats: Sequence[torch.Tensor]) -> list[float] | None:
    """The exact sums as numbers, from one call of the native library; None where that cannot form them.

    Args:
        flats: of one dtype.
    """
    function = _native()
    if function is None or not all([flat.is_cpu and flat.is_contiguous() for flat in flats]):
        return None
    dtypes = {flat.dtype for flat in flats}
    if len(dtypes) != 1 or not dtypes <= KINDS.keys():
        return [] if not flats else None
    # Plain arrays: an array of ctypes is a class of its own, which is left to the garbage collector.
    addresses = array("Q", [flat.data_ptr() for flat in flats])
    numels, sums = array("q", [flat.numel() for flat in flats]), array("d", bytes(8 * len(flats)))
    places = [each.buffer_info()[0] for each in (addresses, numels, sums)]
    workers = threads() if max(numels) > _CHUNK else 1
    function(places[0], KINDS[dtypes.pop()], places[1], len(flats), workers, places[2])
    return list(sums)


def _native() -> Callable[..., None] | None:
    native = library()
    if native is None:
        return None
    function = native.ds_sums_of_squares
    if function.argtypes is None:
        function.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
        ]  # fmt: skip
        function.restype = None
    return function


def _in_chunks(flat: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    scratch = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float64)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        wide = scratch[: part.numel()].copy_(part)
        total += torch.dot(wide, wide)
    return total


def clip_factor(norm: float, limit: float) -> float:
    """Factor for all gradients so that their norm is at most `limit` (Pascanu et al., 2013; as torch forms it).

    Args:
        norm: global norm before clipping.
        limit: `gradient_clipping`; 0 turns clipping off.
    """
    if limit <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
