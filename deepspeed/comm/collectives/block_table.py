"""Places of quantised blocks in tensors, and the torch form of `BlockCodec`, for all blocks of a message at once.

A table has a row for each block: where its values start and how many they are, and where its scale and its codes are in
the payload. So the slices of a message for many ranks are encoded by one chain of operators instead of one for each
rank, or by one kernel: `kernels.current` may hold compiled kernels with the same bits (`ops/triton/blocks.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepspeed.foundation.fake_mode import Replaceable

# Blocks of this many elements in all are processed together, which limits the memory of fp32 copies.
_CHUNK = 1 << 23
_SMALLEST_SCALE, _NAN_SCALE = 0x0080, 0x7FC0  # bits of the smallest normal bf16 and of NaN
_LARGEST = 1 << 31  # places are int32 below this, for kernels

Segments = tuple[Sequence[int], int, int]
"""Lengths of segments, index of the first value, and of the first byte of their payload."""


class BlockKernels(Protocol):
    """Kernels that do what `BlockTable` does; each method returns False if there is no kernel for its arguments."""

    def encode(
        self, table: BlockTable, values: Tensor, payload: Tensor, memory: Tensor | None, beta: float
    ) -> bool: ...

    def decode(self, table: BlockTable, payload: Tensor, out: Tensor) -> bool: ...

    def sum(self, table: BlockTable, parts: Parts, out: Tensor, scale: float, add: bool) -> bool: ...


kernels: Replaceable[BlockKernels | None] = Replaceable(None)


class BlockTable:
    """Blocks of some payloads that lie in one tensor; see [Note: payload] in `block_codec`.

    Args:
        bits, block: of the codec.
        parts: payloads.

    Attributes:
        numel: values up to the end of the last block.
        nbytes: bytes of the payload up to the end of the last block.
        blocks: number of blocks.
    """

    def __init__(self, bits: int, block: int, parts: Sequence[Segments]) -> None:
        self.bits, self.block, self.limit = bits, block, (1 << (bits - 1)) - 1
        rows = np.concatenate([np.zeros((4, 0), np.int64), *(_rows(bits, block, *part) for part in parts)], 1)
        self.blocks = rows.shape[1]
        ends = (rows[0] + rows[1], rows[3] + -(-rows[1] * bits // 8), 2 * rows[2] + 2)
        self.numel = int(ends[0].max(initial=0))
        self.nbytes = int(max(ends[1].max(initial=0), ends[2].max(initial=0)))
        self.small = max(self.numel, self.nbytes) < _LARGEST
        self._rows = rows.astype(np.int32) if self.small else rows
        self._on: dict[torch.device, Tensor] = {}
        step = max(1, _CHUNK // block)
        firsts = range(0, self.blocks, step)
        self._chunks = [_Chunk(rows[:, first : first + step], first, bits, block) for first in firsts]

    def rows(self, device: torch.device) -> Tensor:
        """Return the table, [4, blocks]: start and number of values, places of scale (in 2 bytes) and codes (bytes)."""
        if device not in self._on:
            self._on[device] = torch.from_numpy(self._rows).to(device)
        return self._on[device]

    def encode(self, values: Tensor, payload: Tensor, memory: Tensor | None = None, beta: float = 0.0) -> None:
        """Encode all blocks; arguments as in `BlockLayout.encode`, tensors of at least `numel` and `nbytes`."""
        form = kernels.current
        if values.device.type == "cpu" or form is None or not form.encode(self, values, payload, memory, beta):
            for chunk, rows in self._each(values.device):
                self._encode(chunk, rows, values, payload, memory, beta)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode all blocks into `out`: fp32, bf16 or fp16."""
        form = kernels.current
        if out.device.type == "cpu" or form is None or not form.decode(self, payload, out):
            for chunk, rows in self._each(out.device):
                chunk.values.put(self._decoded(chunk, rows, payload).to(out.dtype), rows[0], out)

    def _each(self, device: torch.device) -> Iterator[tuple[_Chunk, Tensor]]:
        table = self.rows(device)
        for chunk in self._chunks:
            yield chunk, table[:, chunk.first : chunk.first + chunk.count]

    def _encode(
        self, chunk: _Chunk, rows: Tensor, values: Tensor, payload: Tensor, memory: Tensor | None, beta: float
    ) -> None:
        limit = self.limit
        x = chunk.values.take(values, rows[0]).float()
        errors = None if memory is None else chunk.values.take(memory, rows[0]).float()
        if errors is not None:
            x = x + errors
        most = x.abs().amax(1)
        # By a tensor: devices multiply by the reciprocal of a number.
        bits = (most / torch.full_like(most, limit)).to(torch.bfloat16).view(torch.int16)
        bits = bits.masked_fill(bits < _SMALLEST_SCALE, 0).masked_fill(most.isnan(), _NAN_SCALE)
        scale, finite = bits.view(torch.bfloat16).float(), most.isfinite()[:, None]
        inverse = torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))
        special = x.sign().masked_fill(x.isfinite(), 0).masked_fill(x.isnan(), -limit - 1)
        codes = torch.where(finite, (x * inverse[:, None]).round(), special).to(torch.int8)
        chunk.scales.put(bits[:, None], rows[2], _halves(payload))
        packed = codes.view(torch.uint8)
        if self.bits == 4:
            packed = (packed[:, 0::2] & 0x0F) | (packed[:, 1::2] << 4)
        chunk.codes.put(packed, rows[3], payload)
        if memory is not None and errors is not None:
            remaining = beta * errors + (1.0 - beta) * (x - codes.float() * scale[:, None])
            chunk.values.put(torch.where(finite, remaining, 0.0).to(memory.dtype), rows[0], memory)

    def _decoded(self, chunk: _Chunk, rows: Tensor, payload: Tensor) -> Tensor:
        """Return the values of a chunk in fp32, [blocks, elements of a block]."""
        scale = chunk.scales.take(_halves(payload), rows[2]).view(torch.bfloat16).float()
        codes = chunk.codes.take(payload, rows[3])
        if self.bits == 4:
            halves = torch.stack([codes & 0x0F, codes >> 4], 2).view(chunk.count, self.block)
            signed = (halves ^ 8).float() - 8
        else:
            signed = codes.view(torch.int8).float()
        special = torch.where(signed == 0, 0.0, signed * float("inf"))
        special = special.masked_fill(signed == -self.limit - 1, float("nan"))
        return torch.where(scale.isfinite(), signed * scale, special)


def _rows(bits: int, block: int, lengths: Sequence[int], first_value: int, first_byte: int) -> np.ndarray:
    """Return the rows of one payload, [4, blocks] int64."""
    sizes = np.asarray(lengths, np.int64)
    counts, nbytes = -(-sizes // block), -(-sizes * bits // 8)
    segment = np.repeat(np.arange(len(sizes)), counts)
    blocks = np.arange(len(segment))
    within = blocks - (np.cumsum(counts) - counts)[segment]
    start = (np.cumsum(sizes) - sizes)[segment] + within * block
    length = np.minimum(block, sizes[segment] - within * block)
    codes = 2 * len(blocks) + (np.cumsum(nbytes) - nbytes)[segment] + within * (block * bits // 8)
    return np.stack([start + first_value, length, blocks + first_byte // 2, codes + first_byte])


def _halves(payload: Tensor) -> Tensor:
    """Return a payload as int16."""
    return payload[: payload.numel() // 2 * 2].view(torch.int16)


class _Chunk:
    """Blocks of a table that are processed together.

    Args:
        rows: their rows, [4, blocks].
        first: index of the first one in the table.
        bits, block: of the codec.
    """

    def __init__(self, rows: np.ndarray, first: int, bits: int, block: int) -> None:
        self.first, self.count = first, rows.shape[1]
        self.values = _Places(rows[0], rows[1], block)
        self.scales = _Places(rows[2], np.ones_like(rows[1]), 1)
        self.codes = _Places(rows[3], -(-rows[1] * bits // 8), block * bits // 8)


class _Places:
    """Pieces of a flat tensor that are the rows of a matrix, padded with zeros to one width.

    Args:
        starts: index of the first element of each piece.
        lengths: number of elements of each piece, at least one.
        width: number of columns.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, width: int) -> None:
        self.width, self.full = width, bool((lengths == width).all())
        joined = self.full and bool((np.diff(starts) == width).all())
        self._whole = slice(int(starts[0]), int(starts[0]) + len(starts) * width) if joined else None
        self._lengths = lengths.astype(np.int32)
        self._on: dict[torch.device, Tensor] = {}

    def _last(self, device: torch.device) -> Tensor:
        """Return the last column of each piece, [rows, 1] int32."""
        if device not in self._on:
            self._on[device] = torch.from_numpy(self._lengths - 1)[:, None].to(device)
        return self._on[device]

    def take(self, flat: Tensor, starts: Tensor) -> Tensor:
        """Return the matrix; `starts` are the starts of the pieces on the device."""
        if self._whole is not None:
            return flat[self._whole].view(-1, self.width)
        columns = torch.arange(self.width, device=flat.device, dtype=starts.dtype)
        if self.full:
            return flat[starts[:, None] + columns]
        last = self._last(flat.device)
        return flat[starts[:, None] + torch.minimum(columns, last)].masked_fill(columns > last, 0)

    def put(self, matrix: Tensor, starts: Tensor, flat: Tensor) -> None:
        """Copy a matrix back into the pieces of `flat`."""
        if self._whole is not None:
            flat[self._whole].view(-1, self.width).copy_(matrix)
            return
        columns = torch.arange(self.width, device=flat.device, dtype=starts.dtype)
        if not self.full:  # padding writes the last element again, since a mask would make the host wait
            columns = torch.minimum(columns, self._last(flat.device))
            matrix = matrix.gather(1, columns.long())
        flat[starts[:, None] + columns] = matrix


class Parts:
    """Contributions to a sum in rank order that lie at equal distances in one tensor, but for plain ones.

    Args:
        payload: 1-D uint8; contribution r is encoded at byte r * stride.
        count: number of contributions.
        stride: bytes, even.
        own: index of a plain contribution, whose place in `payload` is not read; -1: all are encoded.
        values: the plain contribution; None: all are encoded.
    """

    def __init__(self, payload: Tensor, count: int, stride: int, own: int, values: Tensor | None) -> None:
        self.payload, self.count, self.stride, self.own, self.values = payload, count, stride, own, values

    @staticmethod
    def of(parts: Sequence[Tensor], nbytes: int) -> Parts | None:
        """Return `parts`, of `nbytes` each where encoded, in this form; None if they do not have it."""
        encoded = [index for index, part in enumerate(parts) if part.dtype == torch.uint8]
        if len(encoded) < len(parts) - 1 or len(encoded) < 2:
            return None
        low, high = encoded[0], encoded[-1]
        offsets = [int(parts[index].storage_offset()) for index in encoded]
        stride = (offsets[-1] - offsets[0]) // (high - low)
        start = offsets[0] - low * stride
        storages = {parts[index].untyped_storage()._cdata for index in encoded}
        if len(storages) > 1 or offsets != [start + index * stride for index in encoded]:
            return None
        if stride % 2 or start < 0 or start % 2 or stride < nbytes:
            return None
        payload = parts[low].as_strided((high * stride + nbytes,), (1,), start)
        plain = next((index for index in range(len(parts)) if index not in encoded), -1)
        return Parts(payload, len(parts), stride, plain, None if plain < 0 else parts[plain])


class StackedTable:
    """Decoding and summing of `Parts`: tables for all of them, by number and distance.

    Args:
        bits, block: of the codec.
        lengths: lengths of the segments of a contribution.
    """

    def __init__(self, bits: int, block: int, lengths: Sequence[int]) -> None:
        self._codec, self._lengths, self._numel = (bits, block), lengths, sum(lengths)
        self.one = BlockTable(bits, block, [(lengths, 0, 0)])
        self._tables: dict[tuple[int, int, int], BlockTable] = {}

    def sum(self, parts: Parts, out: Tensor, scale: float, add: bool) -> None:
        """Do `BlockLayout.sum`."""
        form = kernels.current
        if out.device.type != "cpu" and form is not None and form.sum(self.one, parts, out, scale, add):
            return
        key = parts.count, parts.stride, parts.own
        if key not in self._tables:
            others = [rank for rank in range(parts.count) if rank != parts.own]
            places = [(self._lengths, rank * self._numel, rank * parts.stride) for rank in others]
            self._tables[key] = BlockTable(*self._codec, places)
        terms = torch.empty(parts.count, self._numel, dtype=torch.float32, device=out.device)
        self._tables[key].decode(parts.payload, terms.view(-1))
        rows = [parts.values if rank == parts.own else terms[rank] for rank in range(parts.count)]
        total_of([row for row in rows if row is not None], out, scale, add)


def total_of(terms: Sequence[Tensor], out: Tensor, scale: float, add: bool) -> None:
    """Compute out = scale * (terms[0] + terms[1] + …) in fp32 (added to `out` if `add`)."""
    total = terms[0].detach().to(torch.float32, copy=True)
    for term in itertools.islice(terms, 1, None):
        total.add_(term)
    if scale != 1.0:
        total.mul_(scale)
    if add:
        total.add_(out)
    out.copy_(total)
