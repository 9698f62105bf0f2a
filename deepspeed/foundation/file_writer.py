"""File-like writers for `torch.save(state, writer)`: plain, counting only, and through a page-locked buffer."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.errors import ArgumentError


class PyFileWriter:
    """Writer that uses Python's file object.

    Args:
        file_path: path of the file, which is created or truncated.
    """

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(file_path)
        self._file: io.BufferedWriter | None = open(self._path, "wb")
        self._writes = self._bytes = 0

    def write(self, buffer: Any) -> int:
        """Append a bytes-like object and return the number of bytes.

        Raises:
            ArgumentError: the writer is closed.
        """
        written = self._put(buffer)
        self._writes += 1
        self._bytes += written
        return written

    def _put(self, buffer: Any) -> int:
        return self._open_file().write(buffer)

    def _dump_state(self) -> None:
        """Print statistics of the writes; programs call this after `close`."""
        print(f"{type(self).__name__}: {self._bytes} bytes in {self._writes} writes to {self._path}")

    def flush(self) -> None:
        self._open_file().flush()

    def fileno(self) -> int:
        return self._open_file().fileno()

    def file_path(self) -> str:
        """Return the path of the file."""
        return self._path

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_file(self) -> io.BufferedWriter:
        if self._file is None:
            raise ArgumentError(f"the writer of {self._path} is closed")
        return self._file


class MockFileWriter(PyFileWriter):
    """Writer that discards all bytes, to measure the time of serialization alone.

    Args:
        file_path: path of the file, which is created or truncated, and remains empty.
    """

    def _put(self, buffer: Any) -> int:
        self._open_file()
        return memoryview(buffer).nbytes


@dataclass
class FastFileWriterConfig:
    """Settings of `FastFileWriter`.

    Attributes:
        dnvme_handle: no effect; an asynchronous I/O handle (`AsyncIOBuilder().load().aio_handle()`).
        pinned_tensor: contiguous CPU tensor of any dtype, used as the buffer.
        double_buffer: no effect; the system's page cache replaces a second buffer.
        num_parallel_writers, writer_rank, global_rank: no effect.
    """

    dnvme_handle: Any
    pinned_tensor: torch.Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(PyFileWriter):
    """Writer that collects bytes in a pinned tensor and writes each full buffer at once.

    Args:
        file_path: path of the file, which is created or truncated.
        config: see `FastFileWriterConfig`.

    Raises:
        ArgumentError: the buffer is empty, not contiguous or not on the CPU.
    """

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        buffer = config.pinned_tensor
        if buffer.numel() == 0 or not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise ArgumentError("pinned_tensor is the buffer of the file: a contiguous tensor on the CPU with elements")
        super().__init__(file_path)
        self._buffer = memoryview(buffer.detach().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        self._filled = 0

    def _put(self, buffer: Any) -> int:
        file, data = self._open_file(), memoryview(buffer).cast("B")
        for start in range(0, len(data), len(self._buffer)):
            piece = data[start : start + len(self._buffer)]
            if len(piece) > len(self._buffer) - self._filled:
                self._write_out(file)
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
        return len(data)

    def flush(self) -> None:
        file = self._open_file()
        self._write_out(file)
        file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._write_out(self._file)
        super().close()

    def _write_out(self, file: io.BufferedWriter) -> None:
        file.write(self._buffer[: self._filled])
        self._filled = 0
