"""Megatron's pair of files, against bytes that this file writes by the format's table."""

from __future__ import annotations

import gc
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
    dataset_exists,
    find_fit_int_dtype,
    infer_dataset_impl,
    make_builder,
    make_dataset,
)
from deepspeed.errors import ArgumentError, DataError, UsageError

ROWS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 9]]
MARKS = [0, 3, 4]
# dtype codes that both programs have, and those that they read in different ways
CODES = {
    "deepspeed": {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 6, "u4": 7, "u8": 8},
    "megatron": {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8},
}
EVERY = [(dialect, dtype) for dialect, codes in CODES.items() for dtype in codes]


def index_bytes(lengths: list[int], itemsize: int, code: int, marks: list[int], version: int = 1) -> bytes:
    offsets = [sum(lengths[:row]) * itemsize for row in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(marks))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(marks)}q", *lengths, *offsets, *marks)


def write_pair(prefix: Path, dialect: str = "deepspeed", dtype: str = "i4", rows: list[list[int]] = ROWS) -> Path:
    itemsize = np.dtype(dtype).itemsize
    index = index_bytes([len(row) for row in rows], itemsize, CODES[dialect][dtype], MARKS)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(row, dtype).tobytes() for row in rows))
    return prefix


def as_lists(dataset: MMapIndexedDataset) -> list[list[Any]]:
    return [row.tolist() for row in dataset]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dialect", "dtype"), EVERY)
def test_both_dialects_are_read(tmp_path: Path, dialect: Any, dtype: str) -> None:
    prefix = write_pair(tmp_path / "a", dialect, dtype)
    ambiguous = dtype == "f4"  # as long as DeepSpeed's uint32
    dataset = MMapIndexedDataset(prefix, dialect="megatron" if ambiguous else None)
    assert dataset.dtype == np.dtype(dtype) and as_lists(dataset) == ROWS
    assert dataset.doc_idx.tolist() == dataset.get_doc_idx().tolist() == MARKS
    assert dataset.sizes.tolist() == [3, 1, 4, 2] and dataset.size(2) == 4


@pytest.mark.parametrize(("dialect", "dtype"), EVERY)
def test_the_builder_writes_the_formats_bytes(tmp_path: Path, dialect: Any, dtype: str) -> None:
    expected = write_pair(tmp_path / "a", dialect, dtype)
    builder = MMapIndexedDatasetBuilder(tmp_path / "b.bin", np.dtype(dtype), dialect)
    for position, row in enumerate(ROWS):
        builder.add_item(torch.tensor(row))
        if position + 1 in MARKS:
            builder.end_document()
    builder.finalize(tmp_path / "b.idx")
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"b{suffix}").read_bytes() == expected.with_suffix(suffix).read_bytes()


def test_rows_by_integers_slices_and_parts(tmp_path: Path) -> None:
    dataset = MMapIndexedDataset(write_pair(tmp_path / "a"))
    assert dataset[np.int64(2)].tolist() == dataset[-2].tolist() == ROWS[2]
    assert [row.tolist() for row in dataset[1:3]] == ROWS[1:3] and dataset[4:] == []
    assert dataset.get(2, 1, 2).tolist() == [6, 7] and dataset.get(2, offset=3).tolist() == [8]
    assert dataset.get(2, 4).tolist() == []
    for index in (4, -5):
        with pytest.raises(IndexError, match="which has 4"):
            dataset[index]
    with pytest.raises(DataError, match="step 1, not 2"):
        dataset[::2]
    with pytest.raises(DataError, match="elements 2 to 5 of row 2"):
        dataset.get(2, 2, 3)


def test_rows_outlive_the_dataset_and_loader_workers_read_it(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a")
    dataset = pickle.loads(pickle.dumps(MMapIndexedDataset(prefix)))
    row, parts = dataset[2], dataset[0:2]
    del dataset
    gc.collect()
    prefix.with_suffix(".bin").unlink()
    assert row.tolist() == ROWS[2] and [part.tolist() for part in parts] == ROWS[:2]
    loader = torch.utils.data.DataLoader(MMapIndexedDataset(write_pair(tmp_path / "b")), None, num_workers=1)
    assert [batch.tolist() for batch in loader] == ROWS


def test_offsets_beyond_three_gigabytes(tmp_path: Path) -> None:
    lengths = [2**30 - 8, 2**30, 2**30, 16]  # sums of int32 overflow
    (tmp_path / "a.idx").write_bytes(index_bytes(lengths, 1, 1, [0, 4]))
    with (tmp_path / "a.bin").open("wb") as file:
        file.seek(sum(lengths[:3]) - 4)
        file.write(bytes(range(20)))
        assert file.tell() > 3 * 10**9
    assert (tmp_path / "a.bin").stat().st_blocks * 512 < 10**6, "the file system has no sparse files"
    dataset = MMapIndexedDataset(tmp_path / "a")
    assert dataset[3].tolist() == list(range(4, 20))
    assert dataset.get(2, 2**30 - 4).tolist() == [0, 1, 2, 3]
    parts = dataset[0:4]
    assert [len(part) for part in parts] == lengths and parts[2][-1] == 3 and parts[3][0] == 4
    assert int(dataset.sizes.sum()) == sum(lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda idx, bin_: (idx[:30], bin_), "the header alone"),
        (lambda idx, bin_: (idx[:-1], bin_), "truncated: 4 rows and 3 document marks"),
        (lambda idx, bin_: (idx, bin_[:-1]), "truncated, or of another index"),
        (lambda idx, bin_: (b"TNTIDX\x00\x00" + idx, bin_), "fairseq's old format"),
        (lambda idx, bin_: (b"PK" + idx, bin_), "is no index"),
        (lambda idx, bin_: (b"", bin_), "is no index"),
        (lambda idx, bin_: (idx[:9] + b"\x02" + idx[10:], bin_), "version 2"),
        (lambda idx, bin_: (idx[:17] + b"\x09" + idx[18:], bin_), "dtype code 9"),
        (lambda idx, bin_: (idx[:17] + b"\x08" + idx[18:], bin_), "as uint64 or uint16 the rows"),
        (lambda idx, bin_: (idx[:17] + b"\x06" + idx[18:], bin_), "as uint16 or float64 the rows"),
        (lambda idx, bin_: (idx[:18] + b"\xff" * 8 + idx[26:], bin_), "is truncated"),
    ],
)
def test_truncated_and_foreign_files_are_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    prefix = write_pair(tmp_path / "a")
    index, data = change(prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes())
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(data)
    with pytest.raises(DataError, match=message):
        MMapIndexedDataset(prefix)


def test_a_damaged_row_is_refused_when_it_is_read(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a")
    index = bytearray(prefix.with_suffix(".idx").read_bytes())
    index[34:38] = struct.pack("<i", 2**31 - 1)
    index[38:42] = struct.pack("<i", -3)
    prefix.with_suffix(".idx").write_bytes(bytes(index))
    dataset = MMapIndexedDataset(prefix)
    for row in (0, 1):
        with pytest.raises(DataError, match="damaged|of row 1"):
            dataset[row]
    assert dataset[2].tolist() == ROWS[2]


def test_a_missing_file_and_an_empty_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MMapIndexedDataset(tmp_path / "none")
    MMapIndexedDatasetBuilder(tmp_path / "a.bin", np.uint16).finalize(tmp_path / "a.idx")
    dataset = MMapIndexedDataset(tmp_path / "a")
    assert len(dataset) == 0 and dataset.dtype == np.uint16 and dataset[:] == []
    builder = MMapIndexedDatasetBuilder(tmp_path / "b.bin", np.uint16)
    builder.add_items([[], [1], []])
    builder.finalize(tmp_path / "b.idx")
    assert as_lists(MMapIndexedDataset(tmp_path / "b")) == [[], [1], []]


def test_files_are_merged(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", "megatron", "u2")
    builder = make_builder(tmp_path / "b.bin", vocab_size=50257)
    builder.add_item([7, 7])
    builder.end_document()
    builder.merge_file_(tmp_path / "a")
    builder.finalize(tmp_path / "b.idx")
    merged = make_dataset(tmp_path / "b", "infer")
    assert merged.dtype == np.uint16 and as_lists(merged) == [[7, 7], *ROWS]
    assert merged.doc_idx.tolist() == [0, 1, 4, 5]
    with pytest.raises(DataError, match="rows of uint16, the file that is written int32"):
        make_builder(tmp_path / "c.bin", "mmap", 65500).merge_file_(tmp_path / "a")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(tmp_path / "a.bin", np.uint16)
    for values in ([65536], [-1], [0.5]):
        with pytest.raises(DataError, match="do not fit uint16"):
            builder.add_item(values)
    builder.add_item([65535])
    builder.finalize(tmp_path / "a.idx")
    with pytest.raises(UsageError, match="after finalize"):
        builder.add_item([1])
    assert as_lists(MMapIndexedDataset(tmp_path / "a")) == [[65535]]
    with pytest.raises(ArgumentError, match="uint64 has no dtype code in megatron's"):
        MMapIndexedDatasetBuilder(tmp_path / "b.bin", np.uint64, "megatron")
    for impl in ("lazy", "cached"):
        with pytest.raises(DataError, match=impl):
            make_dataset(tmp_path / "a", impl)
        with pytest.raises(DataError, match=impl):
            make_builder(tmp_path / "b.bin", impl)


def test_helpers(tmp_path: Path) -> None:
    builder = create_mmap_dataset_builder(tmp_path / "a", np.int32)
    builder.add_item_numpy(np.array([1, 2]))
    close_mmap_dataset_builder(builder, tmp_path / "a")
    assert MMapIndexedDataset(tmp_path / "a").doc_idx.tolist() == [0, 1]
    assert dataset_exists(tmp_path / "a") and not dataset_exists(tmp_path / "b")
    assert infer_dataset_impl(tmp_path / "a") == "mmap" and infer_dataset_impl(tmp_path / "b") is None
    fits = [find_fit_int_dtype(*limits) for limits in ((0, 255), (-1, 127), (-1, 255), (0, 70000), (-(2**40), 0))]
    assert fits == [np.uint8, np.int8, np.int16, np.uint32, np.int64]
    with pytest.raises(ArgumentError, match="64 bits"):
        find_fit_int_dtype(0, 2**64)


def test_upstreams_import_path() -> None:
    from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset

    assert indexed_dataset.MMapIndexedDataset is MMapIndexedDataset
