"""Lossless 12-bit form of bf16 matrices: sign, 7-bit mantissa, and a 4-bit code for the 16 most common exponents."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.errors import ArgumentError, PackingError
from deepspeed.native import library, threads

GROUP, BLOCK, PIECE = 4, 64, 96  # interleaved outputs, columns per block, bytes per block: as in lossless.h
RAREST = 1 << 10  # maximum rate of escapes: each costs as much time as some hundred other elements
_HUGE = 2 << 20  # size of a huge page in bytes
_CHUNK = 32 << 20
_CHECKED = 1 << 20  # elements compared at a time
_PARTS = ("codes", "exponents", "starts", "places", "values")


@functools.cache
def functions() -> ctypes.CDLL | None:
    """Return the native library with its function types declared, or None if it is unavailable."""
    native = library()
    if native is not None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        native.ds_exponents.argtypes = [pointer, count, pointer]
        native.ds_pack.argtypes = [pointer, count, count, *[pointer] * 5, count]
        native.ds_unpack.argtypes = [*[pointer] * 5, count, pointer, count, pointer, ctypes.c_int]
        for name in ("exponents", "pack", "unpack"):
            getattr(native, f"ds_{name}").restype = None
    return native


class Room:
    """Allocator of memory for packed matrices, in huge pages if the system has them: these are read faster."""

    huge = hasattr(mmap, "MADV_HUGEPAGE")

    def __init__(self) -> None:
        self._memory: Any = None
        self._at = self._end = 0  # offsets in the mapped memory

    def take(self, count: int) -> torch.Tensor:
        """Allocate `count` zero bytes, as uint8 [count]. The storage of huge pages cannot be resized."""
        if not self.huge:
            return torch.zeros(count, dtype=torch.uint8)
        begin = -(-self._at // 64) * 64
        if begin + count > self._end:
            self._map(max(count, _CHUNK))
            begin = self._at
        self._at = begin + count
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=begin)

    def _map(self, count: int) -> None:
        memory = mmap.mmap(-1, count + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # the kernel may lack huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory, self._at = memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
        self._end = self._at + count


class LosslessWeight(nn.Module):
    """Matrix [rows, columns] of bf16 in 12 bits per element, in host memory; columns are a multiple of 64.

    Elements with a rare exponent (not among the 16 most common ones) are called escapes and stored in 16 bits in
    addition. The parts are non-persistent buffers: the `state_dict` of the layer has the unpacked matrix.

    Args:
        weight: bf16 matrix in host memory.
        room: allocator of the packed memory; None: a new one.

    Raises:
        PackingError: the matrix cannot be packed, or more than one in 1024 of its elements are escapes.
    """

    codes: torch.Tensor
    exponents: torch.Tensor
    starts: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor

    def __init__(self, weight: torch.Tensor, room: Room | None = None) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, torch.bfloat16
        self._shared: Any = lambda: None  # tensor shared by tied layers
        self._version = 0  # version of that tensor
        self.pack(weight.detach(), room or Room(), RAREST)

    def pack(self, weight: torch.Tensor, room: Room, rarest: int = 1) -> None:
        """Pack a matrix of the same shape and replace the current values.

        Args:
            weight: bf16 [rows, columns] in host memory.
            room: allocator of the packed memory.
            rarest: the share of escapes may be at most 1 / `rarest`; 1: any share.

        Raises:
            PackingError: dtype, device or shape is unsupported, the native library is missing, or escapes are too many.
        """
        native = functions()
        if native is None or weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.dim() != 2:
            raise PackingError(f"it is {weight.dtype} on {weight.device}, and bf16 in host memory is packed")
        rows, columns = weight.shape
        if columns % BLOCK or not weight.numel():
            raise PackingError(f"its {columns} inputs are no multiple of {BLOCK}")
        weight = weight.contiguous()
        counts = torch.zeros(256, dtype=torch.long)
        native.ds_exponents(weight.data_ptr(), weight.numel(), counts.data_ptr())
        common = counts.topk(16).indices.sort().values
        escapes = weight.numel() - int(counts[common].sum())
        if escapes * rarest > weight.numel():
            raise PackingError(f"one of {weight.numel() // escapes} elements has a rare exponent")
        groups = -(-rows // GROUP)
        parts = {
            "codes": room.take(groups * GROUP * columns // BLOCK * PIECE),
            "exponents": (common << 7).to(torch.int16).repeat(2),
            "starts": torch.empty(groups + 1, dtype=torch.int32),
            "places": torch.empty(escapes, dtype=torch.int32),
            "values": torch.empty(escapes, dtype=torch.int16),
        }
        order = ("exponents", "codes", "starts", "places", "values")
        native.ds_pack(weight.data_ptr(), rows, columns, *(parts[name].data_ptr() for name in order), escapes)
        before = dict(self._buffers)
        for name, part in parts.items():
            self.register_buffer(name, part, persistent=False)
        try:
            self._check(weight)
        except PackingError:
            self._buffers.update(before)
            raise
        self._shared = lambda: None

    def _check(self, weight: torch.Tensor) -> None:
        """Raise PackingError unless unpacking restores every bit; rows are compared in parts, to save memory."""
        step = max(GROUP, _CHECKED // weight.shape[1])
        for first in range(0, len(weight), step):
            part = weight[first : first + step]
            unpacked = self._unpacked(torch.arange(first, first + len(part)))
            if not torch.equal(unpacked.view(torch.int16), part.view(torch.int16)):
                raise PackingError("it came back with other bits")

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), self.shape[1], dtype=torch.bfloat16)
        parts = [getattr(self, name).data_ptr() for name in _PARTS]
        functions().ds_unpack(  # type: ignore[union-attr]
            *parts, self.shape[1], rows.data_ptr(), len(rows), out.data_ptr(), threads()
        )
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> LosslessWeight:
        """Move the parts between devices; a change of dtype only changes the attribute `dtype`."""
        wished = fn(torch.zeros((), dtype=self.dtype, device=self.codes.device))
        super()._apply(fn, recurse)
        self.dtype, self._shared = wished.dtype, lambda: None
        return self

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._buffers.values() if part is not None)

    def dense(self) -> torch.Tensor:
        """Return the unpacked matrix: [rows, columns] of `dtype`."""
        native = functions() if self.codes.device.type == "cpu" else None
        matrix = self.dense_in_torch() if native is None else self._unpacked(torch.arange(self.shape[0]))
        return matrix.to(self.dtype)

    def dense_in_torch(self) -> torch.Tensor:
        """Return the unpacked bf16 matrix, by torch operations; for devices without the native library."""
        columns = self.shape[1]
        parts = self.codes.view(-1, columns // BLOCK, GROUP, PIECE).transpose(1, 2)
        signs, codes = parts[..., :BLOCK].int(), parts[..., BLOCK:]
        exponents = self.exponents.int()[torch.cat([codes & 15, codes >> 4], -1).long()]
        bits = ((signs & 0x80) << 8 | signs & 0x7F | exponents).to(torch.int16).reshape(-1, columns)
        groups = torch.repeat_interleave(torch.arange(len(self.starts) - 1), self.starts.diff().long().cpu())
        places = self.places.long()
        bits[groups.to(places.device) * GROUP + places % GROUP, places // GROUP] = self.values
        return bits[: self.shape[0]].view(torch.bfloat16)

    def dense_shared(self) -> torch.Tensor:
        """Return `dense()`; tied layers get the same tensor for a `state_dict`, while it is alive and unchanged."""
        matrix = self._shared()
        version = 0 if matrix is None or matrix.is_inference() else matrix._version
        if matrix is None or version != self._version:  # writes to that tensor do not change the packed matrix
            matrix = self.dense()
            self._shared, self._version = ref(matrix), 0 if matrix.is_inference() else matrix._version
        return matrix

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows `indices` of the matrix: [*indices.shape, columns] of `dtype`."""
        native = functions() if self.codes.device.type == "cpu" else None
        flat = indices.reshape(-1).long().contiguous()
        if native is None or not flat.numel() or int(flat.min()) < 0 or int(flat.max()) >= self.shape[0]:
            return F.embedding(indices, self.dense())  # raises torch's error for wrong indices
        return self._unpacked(flat).view(*indices.shape, self.shape[1]).to(self.dtype)

    def product(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply `F.linear` with the unpacked matrix to `inputs` [..., columns] of `dtype`: [..., rows]."""
        return F.linear(inputs, self.dense(), bias)

    def __deepcopy__(self, memo: Any) -> LosslessWeight:
        copy = LosslessWeight.__new__(LosslessWeight)
        memo[id(self)] = copy
        nn.Module.__init__(copy)
        copy.shape, copy.dtype, copy._shared, copy._version = self.shape, self.dtype, lambda: None, 0
        room = Room()
        for name, part in self._buffers.items():
            copied = room.take(len(part)).copy_(part) if name == "codes" else part.clone()  # type: ignore[union-attr,arg-type]
            copy.register_buffer(name, copied, persistent=False)
        return copy

    def __getstate__(self) -> Any:
        raise ArgumentError("a module with packed bf16 matrices is not pickled: save its state_dict, which is whole")

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, bf16 in 12 bits"
