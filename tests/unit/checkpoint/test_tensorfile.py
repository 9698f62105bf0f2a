"""Tensor files: the safetensors library reads them, any range of them can be read, and any flipped bit is found."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deepspeed.checkpoint.format import safetensors_file
from deepspeed.checkpoint.format.safetensors_file import Range, TensorFile, read_all, write_tensors
from deepspeed.checkpoint.save.save_plan import entry_of
from deepspeed.errors import CheckpointCorruptError


def tensors() -> dict[str, torch.Tensor]:
    made = {
        "odd": torch.randn(5),
        "byte": torch.arange(7, dtype=torch.uint8),
        "long": torch.arange(700_001),
        "low": torch.randn(333_333).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "flag": torch.tensor([True, False, True]),
        "large": torch.randn(1_700_003),
    }
    return made


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    wanted = tensors()
    seal = write_tensors(tmp_path / "x", [entry_of(name, t) for name, t in wanted.items()], {"note": "hello"})
    assert (tmp_path / "x").stat().st_size == seal.nbytes
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata()["note"] == "hello"
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in wanted.items())
    with TensorFile(tmp_path / "x", seal) as file:
        file.verify()
        assert all(torch.equal(file.load(name), tensor) for name, tensor in wanted.items())


def test_any_range_and_dtype(tmp_path: Path) -> None:
    wanted, draw = tensors(), random.Random(0)
    seal = write_tensors(tmp_path / "ours", [entry_of(name, t) for name, t in wanted.items()], {})
    save_file(wanted, tmp_path / "theirs")
    for path, kept in ((tmp_path / "ours", seal), (tmp_path / "theirs", None)):
        with TensorFile(path, kept) as file:
            checks, ranges = [], []
            for _ in range(60):
                name = draw.choice(["long", "low", "large", "odd", "byte"])
                start, stop = sorted(draw.randint(0, wanted[name].numel()) for _ in range(2))
                stored, size = file.find(name), wanted[name].itemsize
                into = torch.zeros(stop - start, dtype=draw.choice([wanted[name].dtype, torch.float64]))
                ranges.append(Range(stored.begin + start * size, stored.begin + stop * size, stored.dtype, into))
                checks.append((into, wanted[name][start:stop]))
            read_all({file: ranges})
            assert all(torch.equal(into, values.to(into.dtype)) for into, values in checks)


def test_rows_at_a_distance(tmp_path: Path) -> None:
    wanted, draw = tensors(), random.Random(2)
    seal = write_tensors(tmp_path / "ours", [entry_of(name, t) for name, t in wanted.items()], {})
    save_file(wanted, tmp_path / "theirs")
    for path, kept in ((tmp_path / "ours", seal), (tmp_path / "theirs", None)):
        with TensorFile(path, kept) as file:
            checks, ranges = [], []
            for _ in range(60):
                name = draw.choice(["long", "low", "large"])
                numel, stored, size = wanted[name].numel(), file.find(name), wanted[name].itemsize
                distance = draw.choice([2, 30, 1000, 70_000, 290_000])
                run = draw.randint(1, distance)
                rows = draw.randint(1, (numel - run) // distance + 1)
                start = draw.randint(0, numel - (rows - 1) * distance - run)
                there = torch.zeros(rows, run + 3, dtype=draw.choice([wanted[name].dtype, torch.float64]))
                begin, end = start, start + (rows - 1) * distance + run
                into = there[:, 1 : run + 1]
                bytes_ = (stored.begin + begin * size, stored.begin + end * size)
                ranges.append(Range(*bytes_, stored.dtype, into, distance * size))
                checks.append((there, wanted[name].as_strided((rows, run), (distance, 1), start)))
            read_all({file: ranges})
            for there, values in checks:
                assert torch.equal(there[:, 1:-2], values.to(there.dtype)) and not there[:, [0, -2, -1]].any()


def test_blocks_between_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4_000_000)
    seal = write_tensors(tmp_path / "x", [entry_of("x", values)], {})
    read: list[int] = []
    fill = TensorFile._fill
    monkeypatch.setattr(TensorFile, "_fill", lambda self, fd, block, at: (read.append(at), fill(self, fd, block, at)))
    into = torch.zeros(8, 3, dtype=torch.int64)
    with TensorFile(tmp_path / "x", seal) as file:
        begin = file.find("x").begin
        read_all({file: [Range(begin, begin + (7 * 500_000 + 3) * 8, torch.int64, into, 500_000 * 8)]})
    assert torch.equal(into, values.as_strided((8, 3), (500_000, 1))) and len(read) == 8


def test_lent_tensors_are_copied_in_bounded_memory(tmp_path: Path) -> None:
    values = torch.randn(3_000_000)
    held = []

    class Hold:
        def __enter__(self) -> None:
            held.append(values.clone())

        def __exit__(self, *_: object) -> None:
            held[-1].zero_()

    lent = safetensors_file.TensorToWrite("b", values.dtype, (values.numel(),), lambda: held[-1], Hold)
    wanted = values.clone()
    seal = write_tensors(tmp_path / "x", [lent], {})
    with TensorFile(tmp_path / "x", seal) as file:
        assert torch.equal(file.load("b"), wanted)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    wanted, draw = tensors(), random.Random(1)
    path = tmp_path / "x"
    seal = write_tensors(path, [entry_of(name, t) for name, t in wanted.items()], {})
    data = path.read_bytes()
    for at in [0, 7, 9, 100, seal.nbytes - 1, *(draw.randrange(seal.nbytes) for _ in range(40))]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointCorruptError, match=str(path)), TensorFile(path, seal) as file:
            file.verify()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointCorruptError, match="bytes"):
        TensorFile(path, seal)


def test_every_flipped_bit_of_a_header_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x"
    seal = write_tensors(path, [entry_of("a", torch.arange(100))], {})
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    fraction = data[:end].replace(b"[0,8]", b"[0,8.0]").rstrip().ljust(end) + data[end:]
    assert len(fraction) == len(data) and fraction != data
    flips = (data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(end) for bit in range(8))
    for damaged in (fraction, *flips):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError, match=str(path)):
            TensorFile(path, seal)


def test_a_read_that_finds_no_memory_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(8, dtype=torch.int64)
    write_tensors(tmp_path / "f.safetensors", [entry_of("a", values)], {})
    with TensorFile(tmp_path / "f.safetensors") as file:
        begin = file.entries["a"].begin
        before = set(os.listdir("/proc/self/fd"))

        def no_memory(*_: object, **__: object) -> torch.Tensor:
            raise MemoryError

        monkeypatch.setattr(safetensors_file.torch, "empty", no_memory)
        with pytest.raises(MemoryError):
            file.read_blocks([(begin, begin + 64, [Range(begin, begin + 64, torch.int64, values.clone())])])
        assert set(os.listdir("/proc/self/fd")) == before
