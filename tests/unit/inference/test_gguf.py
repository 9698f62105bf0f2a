"""GGUF files: what is refused by name, from the header alone, and a small model of a file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import CheckpointCorruptError, CheckpointMissingError, NotAvailableError
from deepspeed.inference import gguf_files
from deepspeed.inference.gguf_files import is_gguf, load_gguf, read_header
from deepspeed.serving.arguments import parse

KINDS = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}
BYTES = {"F32": (1, 4), "F16": (1, 2), "Q8_0": (32, 34), "BF16": (1, 2)}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of `gguf`, where the package is not installed."""
    import enum
    import sys
    from types import SimpleNamespace

    kinds = enum.IntEnum("GGMLQuantizationType", KINDS)
    table = {kinds[name]: size for name, size in BYTES.items()}
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGML_QUANT_SIZES=table, GGMLQuantizationType=kinds))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def written(path: Path, kind: str = "Q8_0", version: int = 3, parts: int = 0) -> Path:
    """A file with a matrix [4, 64] of `kind`, a norm, and metadata with lists."""
    metadata = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("some.words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("some.numbers") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        text("some.flag") + struct.pack("<I?", 7, True),
        text("split.count") + struct.pack("<IH", 2, parts),
    ]
    block, size = BYTES[kind]
    length = 4 * 64 // block * size
    infos = text("a.weight") + struct.pack("<IQQIQ", 2, 64, 4, KINDS[kind], 0)
    infos += text("norm.weight") + struct.pack("<IQIQ", 1, 64, 0, -(-length // 32) * 32)
    head = b"GGUF" + struct.pack("<IQQ", version, 2, len(metadata)) + b"".join(metadata) + infos
    head += bytes(-len(head) % 32)
    path.write_bytes(head + bytes(-(-length // 32) * 32 + 4 * 64))
    return path


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)],
)
def test_dtype_of_a_file(kind: str, dtype: torch.dtype, sizes: None, tmp_path: Path) -> None:
    header = read_header(written(tmp_path / "a.gguf", kind))
    assert header.architecture == "llama" and header.elements == {kind: 256} and header.dtype == dtype


def test_damaged_and_split_files_are_refused(sizes: None, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    whole = written(path).read_bytes()
    for length in range(len(whole)):  # cut anywhere
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointCorruptError, match=r"a\.gguf"):
            read_header(path)
    for place in range(4, 24):  # counts and version
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        with pytest.raises((CheckpointCorruptError, NotAvailableError), match=r"a\.gguf"):
            read_header(path)
    nested = struct.pack("<IQQ", 3, 0, 1) + text("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    with pytest.raises(CheckpointCorruptError, match="list of lists"):
        read_header(_of(path, b"GGUF" + nested))
    with pytest.raises(NotAvailableError, match="version 4"):
        read_header(written(path, version=4))
    with pytest.raises(NotAvailableError, match="one of 3 files"):
        read_header(written(path, parts=3))
    with pytest.raises(NotAvailableError, match="one of several files"):
        read_header(written(tmp_path / "a-00001-of-00002.gguf"))
    with pytest.raises(CheckpointMissingError):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(CheckpointCorruptError):
        load_gguf(_of(path, b"PK\x03\x04 something else"))


def _of(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_errors_of_transformers_are_typed(sizes: None, tmp_path: Path) -> None:
    def fails() -> Any:
        raise KeyError("tokenizer.ggml.model")

    with pytest.raises(NotAvailableError, match="a.gguf cannot be read by Transformers: KeyError"):
        gguf_files._of_file(written(tmp_path / "a.gguf"), fails)


def test_a_checkpoint_key_refuses_files(tmp_path: Path) -> None:
    import deepspeed

    path = written(tmp_path / "a.gguf")
    with pytest.raises(NotAvailableError, match="load_gguf"):
        deepspeed.init_inference(torch.nn.Linear(2, 2), checkpoint=str(path))


def test_the_server_takes_a_file_by_its_name(tmp_path: Path) -> None:
    path = written(tmp_path / "Small-Q8.gguf")
    assert parse([str(path)]).name == "Small-Q8"
    with pytest.raises(ValueError, match="there is no file"):
        parse([str(tmp_path / "other.gguf")])
    with pytest.raises(ValueError, match="own weights"):
        parse([str(path), "--checkpoint", "x"])
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert is_gguf(path) and not is_gguf(folder)
