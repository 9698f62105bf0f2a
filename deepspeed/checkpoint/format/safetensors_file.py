"""Safetensors files with a checksum per block; any range can be read and verified alone.

[Note: blocks] The first tensor of a file, `checksums`, has the CRC-32 of each block of 1 MiB of the data after it. The
manifest has the CRC-32 of the header and this table, so every byte is covered, and a read of a range verifies only the
blocks of that range. Tensors are sorted by element size, so no element crosses a block boundary.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
import operator
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from deepspeed.checkpoint.format import filesystem
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.foundation.malloc import limits_addresses
from deepspeed.native import library


def crc32(data: torch.Tensor) -> int:
    """Return the CRC-32 of a contiguous 1-D uint8 tensor on the CPU."""
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


BLOCK = 1 << 20
_CHUNK = 4 * BLOCK  # bytes handed to one write
_WRITERS, _READERS = 2, 4  # threads; they spend their time in the kernel and in crc32, which release the GIL
_FEW = 8  # blocks that are not worth another reader
_SCRATCH = _WRITERS + 1  # chunks in memory at most, where tensors are not written from their place
_TABLE = "checksums"
_MOST_HEADER = 1 << 28

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype, what: str) -> str:
    """Return the name of a dtype in safetensors files; CheckpointError, about the tensor `what`, if it has none."""
    if dtype not in NAMES:
        raise CheckpointError(f"{what} is of {dtype}, which safetensors files cannot hold; convert it before saving")
    return NAMES[dtype]


@dataclass(frozen=True)
class TensorToWrite:
    """Tensor to write to a file.

    Args:
        name: name in the file.
        dtype: dtype of the values.
        shape: shape in the file.
        values: function that returns a contiguous tensor with the values; its shape may differ from `shape`.
        hold: function that returns the context in which `values` must be called and its result used, for offloaded
            tensors; None: the result stays in memory.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], torch.Tensor]
    hold: Callable[[], AbstractContextManager[None]] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Seal:
    """Length and checksum of a file, as stored in the manifest.

    Args:
        nbytes: length in bytes.
        crc32: CRC-32 of header and checksum table for tensor files, of the whole content for other files.
    """

    nbytes: int
    crc32: int


def file_bytes(entries: Iterable[TensorToWrite]) -> int:
    """Return an estimate of the length in bytes of a file with these tensors, including checksums and header."""
    listed = list(entries)
    body = sum(entry.nbytes for entry in listed)
    return body + 4 * (body // BLOCK + 2) + sum(200 + len(entry.name) for entry in listed) + 4096


# -- writing ----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, entries: Iterable[TensorToWrite], metadata: dict[str, str]) -> Seal:
    """Write a safetensors file with checksums, and sync it to disk.

    Args:
        path: path of the new file.
        entries: tensors, in any order.
        metadata: strings for the `__metadata__` of the header.

    Returns:
        Length and checksum for the manifest.

    Raises:
        CheckpointError: safetensors has no name for a dtype.
        OSError: the file cannot be written.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    body = sum(entry.nbytes for entry in ordered)
    blocks = -(-body // BLOCK)
    blocks += blocks % 2  # an even number of them keeps what follows aligned to eight bytes
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 4 * blocks
    described[_TABLE] = {"dtype": "U32", "shape": [blocks], "data_offsets": [0, offset]}
    for entry in ordered:
        end = offset + entry.nbytes
        name = name_of(entry.dtype, entry.name)
        described[entry.name] = {"dtype": name, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    base = len(header) + 4 * blocks
    with filesystem.created(path) as fd:
        table = _BodyWriter(fd, base, blocks).write(ordered)
        head = header + table
        filesystem.current.write(fd, memoryview(head), 0)
    return Seal(base + body, zlib.crc32(head))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a 1-D uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class _BodyWriter:
    """Writer of the tensors of a file; threads compute the checksums of chunks and write the chunks.

    Args:
        fd: descriptor of the file.
        base: offset of the first tensor byte in the file.
        blocks: number of checksums in the table.
    """

    def __init__(self, fd: int, base: int, blocks: int) -> None:
        self._fd, self._base = fd, base
        self._crcs = [0] * blocks
        self._pool = ThreadPoolExecutor(_WRITERS, "deepspeed-save")
        self._pending: list[Future[None]] = []
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._made = 0
        self._at = 0  # bytes of the body that were handed to threads
        self._scratch: torch.Tensor | None = None
        self._filled = 0

    def write(self, entries: list[TensorToWrite]) -> bytes:
        """Write all entries and return the checksum table, 4 bytes per block."""
        try:
            for hold, together in itertools.groupby(entries, lambda entry: entry.hold):
                with hold() if hold is not None else nullcontext():
                    for entry in together:
                        self._add(_bytes_of(entry.values()), hold is None)
            self._flush()
            self._settle(0)
        finally:
            self._pool.shutdown(cancel_futures=True)
        return b"".join(crc.to_bytes(4, "little") for crc in self._crcs)

    def _add(self, data: torch.Tensor, stays: bool) -> None:
        offset = 0
        while offset < data.numel():
            left = data.numel() - offset
            if stays and data.device.type == "cpu" and not self._filled and left >= _CHUNK:
                self._submit(data[offset : offset + _CHUNK], None)
                offset += _CHUNK
                continue
            scratch = self._room()
            take = min(left, _CHUNK - self._filled)
            scratch[self._filled : self._filled + take].copy_(data[offset : offset + take])
            self._filled += take
            offset += take
            if self._filled == _CHUNK:
                self._flush()

    def _room(self) -> torch.Tensor:
        if self._scratch is None:
            if self._free.empty() and self._made < _SCRATCH:
                self._made += 1
                self._free.put(torch.empty(_CHUNK, dtype=torch.uint8))
            self._scratch = self._free.get()
        return self._scratch

    def _flush(self) -> None:
        scratch, filled = self._scratch, self._filled
        self._scratch, self._filled = None, 0
        if scratch is not None and filled:
            self._submit(scratch[:filled], scratch)

    def _submit(self, chunk: torch.Tensor, scratch: torch.Tensor | None) -> None:
        self._settle(2 * _WRITERS)
        self._pending.append(self._pool.submit(self._write, chunk, self._at, scratch))
        self._at += chunk.numel()

    def _settle(self, most: int) -> None:
        """Wait until at most `most` chunks are pending; re-raise errors of the writer threads."""
        while len(self._pending) > most:
            self._pending.pop(0).result()

    def _write(self, chunk: torch.Tensor, offset: int, scratch: torch.Tensor | None) -> None:
        try:
            for start in range(0, chunk.numel(), BLOCK):
                self._crcs[(offset + start) // BLOCK] = crc32(chunk[start : start + BLOCK])
            filesystem.current.write(self._fd, chunk.numpy().data, self._base + offset)
        finally:
            if scratch is not None:
                self._free.put(scratch)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a file: dtype, shape, offset of the first byte, and of the byte after the last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """Safetensors file that is open for reading; a context manager.

    Args:
        path: path of the file, which may be from another program.
        seal: length and checksum from the manifest; None for files without checksums.

    Raises:
        CheckpointCorruptError: length or checksum differ from `seal`, or the header cannot be read.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, seal: Seal | None = None) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_header(seal)
        except BaseException:
            self.close()
            raise

    def _read_header(self, seal: Seal | None) -> None:
        size = os.fstat(self._fd).st_size
        if seal is not None and size != seal.nbytes:
            raise CheckpointCorruptError(f"{self.path} has {size} bytes; {seal.nbytes} were written")
        prefix = os.pread(self._fd, 8, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size, _MOST_HEADER):
            raise CheckpointCorruptError(f"{self.path} is no safetensors file: it has {size} bytes")
        text = os.pread(self._fd, length, 8)
        try:
            described = json.loads(text)
            self.metadata: dict[str, str] = described.pop("__metadata__", {})
            base = 8 + length
            self.entries = {name: self._stored(entry, base, size) for name, entry in described.items()}
            table = None if seal is None else self.entries.pop(_TABLE)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorruptError(f"{self.path}: its header cannot be read ({error!r})") from error
        self._base, self._table = base, b""
        if seal is not None and table is not None:
            self._base, self._table = table.end, os.pread(self._fd, table.end - table.begin, table.begin)
            if zlib.crc32(self._table, zlib.crc32(prefix + text)) != seal.crc32:
                raise CheckpointCorruptError(f"{self.path}: header or checksums differ from what was written")
        self._end = size

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def find(self, name: str) -> TensorLocation:
        if name not in self.entries:
            raise CheckpointCorruptError(f"{self.path} does not hold {name!r}")
        return self.entries[name]

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor in full; CheckpointCorruptError if it is missing or a checksum differs."""
        stored = self.find(name)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        read_all({self: [Range(stored.begin, stored.end, stored.dtype, tensor.reshape(-1))]})
        return tensor

    def verify(self) -> None:
        """Read all tensors and check their checksums, if the file has checksums.

        Raises:
            CheckpointCorruptError: a block differs; the message names up to four of the block's tensors.
        """
        scratch = torch.empty(BLOCK, dtype=torch.uint8)
        for begin in range(self._base, self._end, BLOCK):
            self._fill(self._fd, scratch[: min(BLOCK, self._end - begin)], begin)

    def _fill(self, fd: int, block: torch.Tensor, begin: int) -> None:
        """Fill `block` from byte `begin` of the file; CheckpointCorruptError if the file ends or a checksum differs."""
        buffer, done = block.numpy().data, 0
        while done < len(buffer):
            got = os.preadv(fd, [buffer[done:]], begin + done)
            if not got:
                raise CheckpointCorruptError(f"{self.path} ends at byte {begin + done}")
            done += got
        if self._table:
            number = (begin - self._base) // BLOCK
            if crc32(block) != int.from_bytes(self._table[4 * number : 4 * number + 4], "little"):
                end = begin + len(buffer)
                inside = [name for name, e in self.entries.items() if e.begin < end and e.end > begin]
                raise CheckpointCorruptError(
                    f"{self.path}: bytes {begin} to {end} differ from what was written; they hold "
                    f"{', '.join(inside[:4])}{' …' if len(inside) > 4 else ''}"
                )

    def blocks(self, begin: int, end: int) -> Iterable[tuple[int, int]]:
        """Yield the byte ranges (begin, end) to read for a byte range: whole blocks if the file has checksums."""
        first = self._base + (begin - self._base) // BLOCK * BLOCK if self._table else begin
        for start in range(first, end, BLOCK):
            yield start, min(start + BLOCK, self._end if self._table else end)

    def read_blocks(self, blocks: list[Block]) -> None:
        """Read blocks in the given order, and copy their ranges to the destinations.

        A separate descriptor lets the kernel read ahead for each caller.
        """
        scratch = torch.empty(BLOCK, dtype=torch.uint8)
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for begin, end, inside in blocks:
                place = inside[0].in_place(begin, end) if len(inside) == 1 else None
                if place is not None:
                    self._fill(fd, place, begin)
                    continue
                block = scratch[: end - begin]
                self._fill(fd, block, begin)
                for range_ in inside:
                    range_.take(block, begin, end)
        finally:
            os.close(fd)

    @staticmethod
    def _stored(entry: dict[str, Any], base: int, size: int) -> TensorLocation:
        begin, end = map(operator.index, entry["data_offsets"])
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if not 0 <= begin <= end <= size - base or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError("an entry lies outside the file or is not as long as its shape")
        return TensorLocation(dtype, shape, base + begin, base + end)


@dataclass(frozen=True)
class Range:
    """Byte range of a file and its destination: consecutive elements, or rows at a constant stride.

    Args:
        begin: first byte in the file.
        end: one past the last byte of the last row.
        dtype: dtype of the stored elements.
        into: destination of any dtype and device: [elements], or [rows, elements per row].
        stride: bytes from the start of a row to the start of the next; 0: consecutive elements.
    """

    begin: int
    end: int
    dtype: torch.dtype
    into: torch.Tensor
    stride: int = 0

    @property
    def row(self) -> int:
        return self.into.shape[-1] * self.dtype.itemsize

    def rows_in(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of rows (first, one past the last) with bytes in [begin, end) of the file."""
        if not self.stride:
            return 0, int(self.begin < end and begin < self.end)
        first = max(-(-(begin - self.begin - self.row + 1) // self.stride), 0)
        return first, min((end - 1 - self.begin) // self.stride + 1, self.into.shape[0])

    def row_at(self, number: int) -> tuple[int, torch.Tensor]:
        """Return the offset of a row's first byte in the file, and the row's destination."""
        return self.begin + number * self.stride, self.into[number] if self.stride else self.into

    def in_place(self, begin: int, end: int) -> torch.Tensor | None:
        """Return the destination of the file's bytes [begin, end) as a uint8 view; None if they must be copied."""
        first, last = self.rows_in(begin, end)
        column, into = self.row_at(first)
        if last - first != 1 or column > begin or column + self.row < end:
            return None
        if into.dtype != self.dtype or into.device.type != "cpu" or not into.is_contiguous():
            return None
        return _bytes_of(into)[begin - column : end - column]

    def take(self, block: torch.Tensor, begin: int, end: int) -> None:
        """Copy this range's bytes from `block`, the bytes [begin, end) of the file, to the destination.

        Complete rows are copied together, rows that cross the block's boundaries one by one.
        """
        first, last = self.rows_in(begin, end)
        whole_first = first + (self.row_at(first)[0] < begin)
        whole_last = last - (self.row_at(last - 1)[0] + self.row > end)
        for number in {first, last - 1}:
            if not whole_first <= number < whole_last:
                column, into = self.row_at(number)
                low, high, size = max(begin, column), min(end, column + self.row), self.dtype.itemsize
                into[(low - column) // size : (high - column) // size].copy_(
                    block[low - begin : high - begin].view(self.dtype)
                )
        if whole_first >= whole_last:
            return
        column, into = self.row_at(whole_first)
        if not self.stride:
            into.copy_(block[column - begin : column - begin + self.row].view(self.dtype))
            return
        rows = whole_last - whole_first
        values = block[column - begin : column - begin + (rows - 1) * self.stride + self.row].view(self.dtype)
        strided = values.as_strided((rows, self.into.shape[1]), (self.stride // self.dtype.itemsize, 1))
        self.into[whole_first:whole_last].copy_(strided)


Block = tuple[int, int, list[Range]]  # first byte in the file, one past the last, ranges to copy from it


def read_all(wanted: dict[TensorFile, list[Range]]) -> None:
    """Read ranges of files into their destinations, with up to four threads.

    Raises:
        CheckpointCorruptError: the checksum of an affected block differs, or a file is too short.
    """
    runs: list[tuple[TensorFile, list[Block]]] = []
    for file, ranges in wanted.items():
        blocks: dict[tuple[int, int], list[Range]] = {}
        for range_ in ranges:
            for block in file.blocks(range_.begin, range_.end):
                first, last = range_.rows_in(*block)
                if first < last:  # else the block lies between two rows
                    blocks.setdefault(block, []).append(range_)
        runs.append((file, [(begin, end, inside) for (begin, end), inside in sorted(blocks.items())]))
    most = max(_FEW, -(-sum(len(run) for _, run in runs) // _READERS))
    tasks = [(file, run[start : start + most]) for file, run in runs for start in range(0, len(run), most)]
    # Stacks and heaps of threads are addresses, and what C libraries keep of them stays when the threads are gone.
    if len(tasks) <= 1 or limits_addresses():
        for file, run in tasks:
            file.read_blocks(run)
        return
    with ThreadPoolExecutor(_READERS, "deepspeed-load") as pool:
        futures = [pool.submit(file.read_blocks, run) for file, run in tasks]
        wait(futures, return_when="FIRST_EXCEPTION")
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.result()
