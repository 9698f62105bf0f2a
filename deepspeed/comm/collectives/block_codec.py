"""Block quantisation of 1-D tensors for messages: int8 or int4 codes with a bf16 scale for each block.

[Note: payload] Values are divided into segments (the parts of parameters) and segments into blocks of 256 elements; the
last block of a segment may be shorter, and no block crosses a border. A payload is a 1-D uint8 tensor: the scales of
all blocks (2 bytes each), then the codes of each segment: `ceil(length * bits / 8)` bytes. Two int4 codes share a byte,
the first one in the low half; a segment of odd length ends with a code of 0.

    limit = 2^(bits-1) - 1                     scale = bf16(max|x| / limit), 0 if that is below 2^-126
    code = round_half_even(x * (1 / scale))    decoded = code * scale, exact in fp32, then rounded to the output dtype

All arithmetic is in fp32. The reciprocal is rounded before it is multiplied, so |x - decoded| <= scale / 2 + 2^-23 |x|.
Codes are never beyond the limit, because rounding makes the scale at most 2^-9 smaller. Magnitudes up to about 1.5e-36
(int8) in a block without larger ones become 0.

A block with an infinity or NaN keeps those values and loses the others: its scale is inf, or NaN if it has a NaN; the
codes of inf and -inf are 1 and -1, that of NaN is the lowest (-128 or -8), all others are 0. An fp16 value of 65504, or
a bf16 value of 3.39e38, can be decoded to an fp16 or bf16 infinity because the rounded scale may be larger.

Native kernels (`native/codec.cpp`), device kernels and the torch form (`block_table.py`) give the same bits.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives.block_table import BlockTable, Parts, StackedTable, total_of
from deepspeed.errors import ArgumentError
from deepspeed.native import KINDS, library, threads

__all__ = ["BlockCodec", "BlockLayout", "join", "uses_library"]

_LARGEST_BLOCK = 1024
_PAYLOAD = len(KINDS)  # the kind of an encoded part of a sum in codec.cpp


@dataclass(frozen=True)
class BlockCodec:
    """Width of codes in bits (8 or 4) and elements per block (even, at most 1024)."""

    bits: int = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ArgumentError(f"codes have 8 or 4 bits, not {self.bits!r}")
        if not 2 <= self.block <= _LARGEST_BLOCK or self.block % 2:
            raise ArgumentError(f"a block has an even number of 2 to {_LARGEST_BLOCK} elements, not {self.block!r}")

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def limit(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def layout(self, borders: Sequence[int]) -> BlockLayout:
        """Return the layout of segments with these borders: 0, the end of each segment in ascending order."""
        return _layout_of(self, tuple(borders))


class BlockLayout:
    """Positions of scales and codes of one codec for one tuple of segment borders; see [Note: payload].

    Attributes:
        codec, borders: what the layout is for.
        numel: number of values.
        blocks: number of blocks.
        nbytes: size of a payload: 2 * blocks + the sum of ceil(length * bits / 8) over the segments.
        lengths: number of values of each segment.
    """

    def __init__(self, codec: BlockCodec, borders: tuple[int, ...]) -> None:
        if not borders or borders[0] != 0 or any(a > b for a, b in itertools.pairwise(borders)):
            raise ArgumentError(f"borders of segments start at 0 and ascend, unlike {_shortened(borders)}")
        self.codec, self.borders, self.numel = codec, borders, borders[-1]
        lengths = [stop - start for start, stop in itertools.pairwise(borders)]
        counts = [-(-length // codec.block) for length in lengths]
        sizes = [-(-length * codec.bits // 8) for length in lengths]
        self.blocks = sum(counts)
        self.nbytes = 2 * self.blocks + sum(sizes)
        self.lengths = lengths
        # Owned here, because the structure has only their addresses.
        self._tables = [
            array("q", borders),
            array("q", itertools.accumulate(counts, initial=0)),
            array("q", itertools.accumulate(sizes, initial=0)),
        ]
        addresses = [table.buffer_info()[0] for table in self._tables]
        self._native = _NativeLayout(codec.bits, codec.block, len(lengths), self.blocks, *addresses)

    def encode(self, values: Tensor, payload: Tensor, memory: Tensor | None = None, beta: float = 0.0) -> None:
        """Write the payload of `values`; with an error memory e, that of h = values + e.

        Args:
            values: fp32, bf16 or fp16.
            memory: bf16, one per value; becomes beta * e + (1 - beta) * (h - decoded h) (LoCo, arXiv:2407.04480), and 0
                in blocks where h is not finite.
            beta: share of the memory that is kept, in [0, 1).
        """
        self._check_values("values", values, values)
        self._check_payload("payload", payload, values)
        if memory is not None:
            self._check_values("memory", memory, values)
            if memory.dtype != torch.bfloat16:
                raise ArgumentError(f"memory of errors is bfloat16, not {memory.dtype}")
        if not 0.0 <= beta < 1.0:
            raise ArgumentError(f"beta of the error memory is in [0, 1), not {beta!r}")
        native = _functions(values)
        if not self.numel:
            return
        if native is None:
            self._stacked.one.encode(values.detach(), payload, memory, beta)
            return
        place = None if memory is None else memory.data_ptr()
        native.ds_block_encode(
            ctypes.byref(self._native), values.data_ptr(), KINDS[values.dtype], payload.data_ptr(), place,
            beta, 1.0 - beta, threads(),
        )  # fmt: skip

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of the payload to `out`: fp32, bf16 or fp16, rounded to nearest even."""
        self._check_values("out", out, out)
        self._check_payload("payload", payload, out)
        native = _functions(out)
        if not self.numel:
            return
        if native is None:
            self._stacked.one.decode(payload, out)
            return
        native.ds_block_decode(
            ctypes.byref(self._native), payload.data_ptr(), out.data_ptr(), KINDS[out.dtype], threads()
        )

    def sum(self, parts: Sequence[Tensor], out: Tensor, scale: float, add: bool) -> None:
        """Compute out = scale * (parts[0] + parts[1] + …) in fp32, with the bits of `sum_in_rank_order`.

        Args:
            parts: payloads (uint8) and plain values (fp32, bf16 or fp16), in any mixture; `out` may be a plain part.
            add: add the result to `out` instead.
        """
        self._check_values("out", out, out)
        if not parts:
            raise ArgumentError("a sum has at least one part")
        for part in parts:
            if part.dtype == torch.uint8:
                self._check_payload("part", part, out)
            else:
                self._check_values("part", part, out)
        native = _functions(out)
        if not self.numel:
            return
        if native is None:
            self._sum_in_torch(parts, out, scale, add)
            return
        # Plain arrays: each ctypes array type is a new class, which only the garbage collector frees.
        addresses = array("Q", [part.data_ptr() for part in parts])
        kinds = array("i", [KINDS.get(part.dtype, _PAYLOAD) for part in parts])
        native.ds_block_sum(
            ctypes.byref(self._native), addresses.buffer_info()[0], kinds.buffer_info()[0], len(parts),
            out.data_ptr(), KINDS[out.dtype], scale, add, threads(),
        )  # fmt: skip

    def relative_error(self, values: Tensor, payload: Tensor) -> Tensor:
        """Return sqrt(sum((values - decoded)^2) / sum(values^2)) in float64, 0 for zeros; for monitors."""
        self._check_values("values", values, values)
        self._check_payload("payload", payload, values)
        wide = values.detach().double()
        decoded = torch.empty(self.numel, dtype=torch.float32, device=values.device)
        self.decode(payload, decoded)
        error = (wide - decoded).square().sum()
        total = wide.square().sum()
        return torch.where(total == 0, total, (error / total).sqrt())

    @cached_property
    def _stacked(self) -> StackedTable:
        return StackedTable(self.codec.bits, self.codec.block, self.lengths)

    def _sum_in_torch(self, parts: Sequence[Tensor], out: Tensor, scale: float, add: bool) -> None:
        stacked = Parts.of(parts, self.nbytes)
        if stacked is not None:
            self._stacked.sum(stacked, out, scale, add)
            return
        terms = list(parts)
        for index, part in enumerate(parts):
            if part.dtype == torch.uint8:
                terms[index] = torch.empty(self.numel, dtype=torch.float32, device=out.device)
                self._stacked.one.decode(part, terms[index])
        total_of(terms, out, scale, add)

    def _check_values(self, name: str, tensor: Tensor, like: Tensor) -> None:
        if tensor.dtype not in KINDS:
            raise ArgumentError(f"{name} of {self.codec.name} blocks: float32, bfloat16 or float16, not {tensor.dtype}")
        if tensor.dim() != 1 or tensor.numel() != self.numel or not tensor.is_contiguous():
            wrong = f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            raise ArgumentError(f"{name} of {self.codec.name} blocks: {self.numel} contiguous elements, not {wrong}")
        _check_device(name, tensor, like)

    def _check_payload(self, name: str, tensor: Tensor, like: Tensor) -> None:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            wrong = f"{tensor.dtype} of {tuple(tensor.shape)} with strides {tensor.stride()}"
            raise ArgumentError(f"{name}: encoded {self.codec.name} blocks are contiguous 1-D uint8, not {wrong}")
        if tensor.numel() < self.nbytes or tensor.storage_offset() % 2:
            wrong = f"{tensor.numel()} bytes at offset {tensor.storage_offset()}"
            raise ArgumentError(f"{name}: {self.nbytes} bytes at an even offset are needed, not {wrong}")
        _check_device(name, tensor, like)


class _NativeLayout(ctypes.Structure):
    """Mirror of `BlockLayout` in deepspeed/native/codec.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("bits", "block", "segments", "blocks")),
        *((name, ctypes.c_void_p) for name in ("borders", "firsts", "places")),
    ]


def _check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ArgumentError(f"{name} is on {tensor.device}, the other tensors on {like.device}")


def _shortened(borders: tuple[int, ...]) -> str:
    return str(borders) if len(borders) <= 8 else f"({', '.join(map(str, borders[:8]))}, …)"


@lru_cache(maxsize=1024)
def _layout_of(codec: BlockCodec, borders: tuple[int, ...]) -> BlockLayout:
    return BlockLayout(codec, borders)


def join(codec: BlockCodec, parts: Sequence[tuple[BlockLayout, int, int]]) -> BlockTable:
    """Return a table of the blocks of several layouts, each with the index of its first value and first byte."""
    return BlockTable(codec.bits, codec.block, [(layout.lengths, value, byte) for layout, value, byte in parts])


def uses_library(tensor: Tensor) -> bool:
    """Return whether the native library encodes this tensor."""
    return _functions(tensor) is not None


def _functions(tensor: Tensor) -> Any:
    """Return the native library, with the types of its functions; None if it cannot be used for this tensor."""
    native = library() if tensor.device.type == "cpu" else None
    if native is not None and native.ds_block_sum.argtypes is None:
        pointer, i32, f32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
        types: dict[str, list[Any]] = {
            "ds_block_encode": [pointer, pointer, i32, pointer, pointer, f32, f32, i32],
            "ds_block_decode": [pointer, pointer, pointer, i32, i32],
            "ds_block_sum": [pointer, pointer, pointer, i32, pointer, i32, f32, ctypes.c_bool, i32],
        }
        for name, arguments in types.items():
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, None
    return native
