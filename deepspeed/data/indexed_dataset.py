"""Megatron's pair of files `.idx` and `.bin`: rows of tokens, read through a memory map.

The index has a magic, a version, a dtype code, the number of rows and of document marks; then int32 lengths, int64 byte
offsets and int64 document marks. Codes 6 to 8 mean other dtypes in DeepSpeed than in Megatron: the size of the data
file decides which were meant.
"""

from __future__ import annotations

import operator
import os
import shutil
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from deepspeed.data.index_lists import Array
from deepspeed.errors import ArgumentError, DataError, UsageError

StrPath = str | os.PathLike[str]
Dialect = Literal["deepspeed", "megatron"]

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
LONGEST_ROW = 2**31 - 1  # lengths are int32
_COMMON = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64}
DTYPES: dict[str, dict[int, Any]] = {
    "deepspeed": _COMMON | {6: np.uint16, 7: np.uint32, 8: np.uint64},
    "megatron": _COMMON | {6: np.float64, 7: np.float32, 8: np.uint16},
}
SMALL_VOCABULARY = 65500  # token ids of a smaller vocabulary are stored as uint16


def index_file_path(prefix_path: StrPath) -> str:
    """Return the path of the index of a pair of files."""
    return f"{os.fspath(prefix_path)}.idx"


def data_file_path(prefix_path: StrPath) -> str:
    """Return the path of the data of a pair of files."""
    return f"{os.fspath(prefix_path)}.bin"


def _mapped(path: str) -> memoryview:
    """Return the bytes of a file. Arrays over them keep the map open; an empty file cannot be mapped."""
    if not os.path.getsize(path):
        return memoryview(b"")
    return np.memmap(path, mode="r", dtype=np.uint8).data


def _names(dtypes: Iterable[Any]) -> str:
    return " or ".join(np.dtype(dtype).name for dtype in dtypes)


class MMapIndexedDataset(Dataset[Array]):
    """Rows of a pair of files, as a map-style dataset.

    Rows are read-only arrays over the map. They stay valid after the dataset is deleted, since each keeps the map open.

    Args:
        path: prefix of the two files.
        skip_warmup: has no effect: files are never read in advance.
        dialect: table for dtype codes 6, 7 and 8; None: the one that fits the size of the data file (code 7, where both
            fit, is DeepSpeed's uint32).

    Raises:
        FileNotFoundError: one of the files does not exist.
        DataError: the index has another format or version or is truncated, or the data file does not fit the index.
        ArgumentError: the dialect is unknown.
    """

    def __init__(self, path: StrPath, skip_warmup: bool = False, dialect: Dialect | None = None) -> None:
        super().__init__()
        self._open(os.fspath(path), dialect)

    def _open(self, path: str, dialect: Dialect | None) -> None:
        self._path = path
        self._dialect: Dialect | None = dialect
        self._data = _mapped(data_file_path(path))
        code = self._read_index(index_file_path(path))
        self._dtype = self._dtype_of(code, dialect)

    def _read_index(self, path: str) -> int:
        index = _mapped(path)
        if bytes(index[: len(OLD_MAGIC)]) == OLD_MAGIC:
            raise DataError(f"{path} is an index of fairseq's old format (TNTIDX); write the pair again as mmap files")
        if bytes(index[: len(MAGIC)]) != MAGIC:
            raise DataError(f"{path} is no index of Megatron's pair of files: it does not begin with {MAGIC[:7]!r}")
        if len(index) < HEADER.size:
            raise DataError(f"{path} is truncated: it has {len(index)} bytes, the header alone {HEADER.size}")
        _, version, code, rows, marks = HEADER.unpack_from(index)
        if version != 1:
            raise DataError(f"{path} has version {version}; only version 1 is known")
        size = HEADER.size + 12 * rows + 8 * marks
        if len(index) < size:
            raise DataError(
                f"{path} is truncated: {rows} rows and {marks} document marks need {size} bytes, it has {len(index)}"
            )
        self.sizes: Array = np.frombuffer(index, np.int32, rows, HEADER.size)
        self._offsets: Array = np.frombuffer(index, np.int64, rows, HEADER.size + 4 * rows)
        self.doc_idx: Array = np.frombuffer(index, np.int64, marks, HEADER.size + 12 * rows)
        return code

    def _dtype_of(self, code: int, dialect: Dialect | None) -> np.dtype[Any]:
        """Return the dtype of a code; where the dialects differ, the one with which the rows fill the data file."""
        if dialect is not None and dialect not in DTYPES:
            raise ArgumentError(f"dialect {dialect!r}; dialects are {', '.join(DTYPES)}")
        tables = [DTYPES[dialect]] if dialect else list(DTYPES.values())
        dtypes = list(dict.fromkeys(table[code] for table in tables if code in table))
        if not dtypes:
            raise DataError(f"{index_file_path(self._path)} has dtype code {code}; codes are 1 to 8")
        ends = [self._end(np.dtype(dtype).itemsize) for dtype in dtypes]
        for dtype, end in zip(dtypes, ends, strict=True):
            if end == len(self._data) or (end is not None and len(dtypes) == 1 and end < len(self._data)):
                return np.dtype(dtype)
        if ends[0] is None:  # no elements
            return np.dtype(dtypes[0])
        raise DataError(
            f"{data_file_path(self._path)} has {len(self._data)} bytes; as {_names(dtypes)} the rows of its index end "
            f"at {' or '.join(str(end) for end in dict.fromkeys(ends))}: the file is truncated, or of another index"
        )

    def _end(self, itemsize: int) -> int | None:
        """Return the offset after the last row with elements; None: there is no such row."""
        for stop in range(len(self.sizes), 0, -65536):
            filled = np.flatnonzero(self.sizes[max(0, stop - 65536) : stop])
            if len(filled):
                row = max(0, stop - 65536) + int(filled[-1])
                return int(self._offsets[row]) + int(self.sizes[row]) * itemsize
        return None

    @staticmethod
    def exists(path: StrPath) -> bool:
        """Return whether both files are there."""
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))

    def __getstate__(self) -> tuple[str, Dialect | None]:
        return self._path, self._dialect

    def __setstate__(self, state: tuple[str, Dialect | None]) -> None:
        self._open(*state)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the rows."""
        return self._dtype

    @property
    def supports_prefetch(self) -> bool:
        """Return False: rows are read where they are used."""
        return False

    def size(self, index: int) -> int:
        """Return the number of elements of a row."""
        return int(self.sizes[index])

    def get_doc_idx(self) -> Array:
        """Return the document marks: document i has the rows from mark i up to mark i + 1."""
        return self.doc_idx

    def set_doc_idx(self, doc_idx_: Any) -> None:
        """Replace the document marks of this object; the files do not change."""
        self.doc_idx = np.asarray(doc_idx_, dtype=np.int64)

    def __getitem__(self, idx: Any) -> Any:
        """Return a row by any integer, or a list of rows by a slice with step 1.

        Raises:
            IndexError: there is no such row.
            DataError: the slice has another step, or a row lies outside of the data file.
        """
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if step != 1:
                raise DataError(f"rows are read in order: a slice has step 1, not {step}")
            return [self.get(row) for row in range(start, stop)]
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """Return `length` elements of a row from `offset` on; None: all that follow.

        Raises:
            IndexError: there is no such row.
            DataError: the range is not inside the row, or the row is not inside the data file.
        """
        row = operator.index(idx)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {self._path}, which has {len(self)}")
        size = int(self.sizes[row])
        count = size - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > size:
            raise DataError(f"{self._path}: elements {offset} to {offset + count} of row {row}, which has {size}")
        start = int(self._offsets[row]) + offset * self._dtype.itemsize
        if start < 0 or start + count * self._dtype.itemsize > len(self._data):
            raise DataError(
                f"{data_file_path(self._path)} ends at byte {len(self._data)}, but row {row} has {size} elements from "
                f"byte {int(self._offsets[row])} on: the index is damaged or of another file"
            )
        return np.frombuffer(self._data, self._dtype, count, start) if count else np.empty(0, self._dtype)


def write_index(path: StrPath, lengths: Any, documents: Any, dtype: Any, dialect: Dialect = "deepspeed") -> None:
    """Write the index of rows that follow each other without gaps.

    Args:
        path: path of the index.
        lengths: number of elements of each row.
        documents: document marks, the first 0 and the last the number of rows.
        dtype: dtype of the rows.
        dialect: which program's code of the dtype is written.

    Raises:
        ArgumentError: the dialect has no code for the dtype.
        DataError: a row has 2^31 elements or more.
    """
    dtype, wide = np.dtype(dtype), np.asarray(lengths, dtype=np.int64)
    code = _code(dtype, dialect)
    if wide.size and int(wide.max()) > LONGEST_ROW:
        raise DataError(f"a row has {int(wide.max())} elements; lengths are stored as int32, at most {LONGEST_ROW}")
    offsets = np.zeros(len(wide), np.int64)
    np.cumsum(wide[:-1] * dtype.itemsize, out=offsets[1:])
    marks = np.asarray(documents, dtype=np.int64)
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, len(wide), len(marks)))
        for part in (wide.astype(np.int32), offsets, marks):
            file.write(part.data)


def _code(dtype: np.dtype[Any], dialect: Dialect) -> int:
    if dialect not in DTYPES:
        raise ArgumentError(f"dialect {dialect!r}; dialects are {', '.join(DTYPES)}")
    codes = [code for code, known in DTYPES[dialect].items() if known == dtype]
    if not codes:
        raise ArgumentError(f"{dtype.name} has no dtype code in {dialect}'s files: {_names(DTYPES[dialect].values())}")
    return codes[0]


class MMapIndexedDatasetBuilder:
    """Writer of a pair of files.

    Args:
        out_file: path of the data file, which is created or replaced.
        dtype: dtype of the rows.
        dialect: which program's dtype codes the index has; Megatron's uint16 has another code than DeepSpeed's.

    Raises:
        ArgumentError: the dialect has no code for the dtype.
    """

    def __init__(self, out_file: StrPath, dtype: Any = np.int64, dialect: Dialect = "deepspeed") -> None:
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._dialect: Dialect = dialect
        _code(self._dtype, dialect)
        self._path = os.fspath(out_file)
        self._file = open(self._path, "wb")  # noqa: SIM115
        self._lengths = array("i")
        self._documents = array("q", [0])

    def add_item(self, tensor: Any) -> None:
        """Append a row: a tensor, array or list, of any shape.

        Raises:
            DataError: a value does not fit an integer dtype, or the row has 2^31 elements or more.
            UsageError: `finalize` was called before.
        """
        if self._file.closed:
            raise UsageError(f"{self._path} is finished: no rows can be added after finalize()")
        values = self._converted(np.asarray(tensor))
        if values.size > LONGEST_ROW:
            raise DataError(f"a row has {values.size} elements; lengths are stored as int32, at most {LONGEST_ROW}")
        self._file.write(values.data if values.size else b"")
        self._lengths.append(values.size)

    def _converted(self, values: Array) -> Array:
        if values.dtype != self._dtype and values.size and not np.can_cast(values.dtype, self._dtype):
            if self._dtype.kind in "iu":
                limits = np.iinfo(self._dtype)
                low, high = values.min().item(), values.max().item()
                if values.dtype.kind not in "iub" or low < limits.min or high > limits.max:
                    raise DataError(f"values from {low} to {high} ({values.dtype.name}) do not fit {self._dtype.name}")
        return np.ascontiguousarray(values, dtype=self._dtype)

    def add_item_numpy(self, arr_np: Any) -> None:
        """Append a row, as `add_item`."""
        self.add_item(arr_np)

    def add_items(self, arr_list: Iterable[Any]) -> None:
        """Append several rows."""
        for row in arr_list:
            self.add_item(row)

    def end_document(self) -> None:
        """Mark the end of a document after the last row."""
        self._documents.append(len(self._lengths))

    def merge_file_(self, another_file: StrPath) -> None:
        """Append the rows and documents of another pair of files.

        Args:
            another_file: its prefix.

        Raises:
            DataError: its rows have another dtype, or do not follow each other without gaps.
        """
        other = MMapIndexedDataset(another_file)
        if other.dtype != self._dtype:
            raise DataError(
                f"{another_file} has rows of {other.dtype.name}, the file that is written {self._dtype.name}"
            )
        ends = np.cumsum(other.sizes, dtype=np.int64) * self._dtype.itemsize
        if not np.array_equal(other._offsets, ends - other.sizes * np.int64(self._dtype.itemsize)):
            raise DataError(f"{another_file} has rows in another order than its index; copy them row by row")
        rows = len(self._lengths)
        self._lengths.frombytes(other.sizes.tobytes())
        marks = other.doc_idx[1:] if len(other.doc_idx) and other.doc_idx[0] == 0 else other.doc_idx
        self._documents.frombytes((marks + rows).astype(np.int64).tobytes())
        with open(data_file_path(another_file), "rb") as source:
            shutil.copyfileobj(source, self._file, 2**20)

    def finalize(self, index_file: StrPath) -> None:
        """Close the data file and write the index."""
        self._file.close()
        write_index(index_file, self._lengths, self._documents, self._dtype, self._dialect)


def infer_dataset_impl(path: StrPath) -> str | None:
    """Return "mmap" for Megatron's pair of files, "cached" for fairseq's old format, None if there is no index."""
    index = Path(index_file_path(path))
    if not index.exists():
        return None
    with index.open("rb") as file:
        magic = file.read(len(MAGIC))
    return "mmap" if magic == MAGIC else "cached" if magic.startswith(OLD_MAGIC) else None


def dataset_exists(path: StrPath, impl: str = "mmap") -> bool:
    """Return whether both files of a pair are there."""
    return MMapIndexedDataset.exists(path)


def make_dataset(path: StrPath, impl: str = "mmap", skip_warmup: bool = False) -> MMapIndexedDataset:
    """Open a pair of files.

    Args:
        path: prefix of the two files.
        impl: "mmap" or "infer"; "lazy" and "cached" name fairseq's old format.
        skip_warmup: has no effect.

    Raises:
        DataError: `impl` is another one, or a file is damaged (see `MMapIndexedDataset`).
        FileNotFoundError: one of the files does not exist.
    """
    if impl not in ("mmap", "infer"):
        raise DataError(f"impl {impl!r}: only files of the format mmap are read; pass 'mmap' or 'infer'")
    return MMapIndexedDataset(path, skip_warmup)


def make_builder(out_file: StrPath, impl: str = "mmap", vocab_size: int | None = None) -> MMapIndexedDatasetBuilder:
    """Start a pair of files, with uint16 for vocabularies under 65,500 tokens, else int32.

    Args:
        out_file: path of the data file.
        impl: "mmap".
        vocab_size: number of tokens of the vocabulary; None: unknown.

    Raises:
        DataError: `impl` is another one.
    """
    if impl != "mmap":
        raise DataError(f"impl {impl!r}: only files of the format mmap are written")
    small = vocab_size is not None and vocab_size < SMALL_VOCABULARY
    return MMapIndexedDatasetBuilder(out_file, np.uint16 if small else np.int32)


def find_fit_int_dtype(min_value: int, max_value: int) -> Any:
    """Return the smallest integer dtype that holds all values of a range, unsigned if none is negative.

    Raises:
        ArgumentError: no dtype of 64 bits or fewer holds them.
    """
    kind = "uint" if min_value >= 0 else "int"
    for bits in (8, 16, 32, 64):
        limits = np.iinfo(f"{kind}{bits}")
        if limits.min <= min_value and max_value <= limits.max:
            return np.dtype(f"{kind}{bits}").type
    raise ArgumentError(f"no integer of 64 bits holds the values from {min_value} to {max_value}")


def create_mmap_dataset_builder(fname: StrPath, dtype: Any) -> MMapIndexedDatasetBuilder:
    """Start a pair of files by its prefix."""
    return MMapIndexedDatasetBuilder(data_file_path(fname), dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: StrPath) -> None:
    """End the last document and write the index of a pair of files by its prefix."""
    builder.end_document()
    builder.finalize(index_file_path(fname))
