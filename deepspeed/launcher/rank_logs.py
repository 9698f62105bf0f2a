"""Output of each rank: shown, stored in a log folder per attempt, and its end reported after a failure."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import struct
import tempfile
import termios
import time
import tty
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

KEPT_JOBS = 10
"""Number of earlier jobs whose log folders in the temporary folder are kept."""


def attempt_folder(named: str, job: str, attempt: str) -> Path | None:
    """Create and return the log folder of an attempt.

    Args:
        named: parent folder; "": the temporary folder, where only this user's last `KEPT_JOBS` jobs are kept.
        job: identifier of the job.
        attempt: number of the attempt.

    Returns:
        The folder; None if the temporary folder is not writable, so that the job runs without logs.

    Raises:
        OSError: `named` is not writable.
    """
    if named:
        folder = Path(named) / f"attempt{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    parent = Path(tempfile.gettempdir(), f"deepspeed-{os.getuid()}")
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.is_symlink() or parent.stat().st_uid != os.getuid():
            parent = Path(tempfile.mkdtemp(prefix="deepspeed-"))
        folder = parent / job / f"attempt{attempt}"
        if not folder.parent.exists():
            with contextlib.suppress(OSError):
                for old in _by_age(parent)[KEPT_JOBS - 1 :]:
                    shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def jobs() -> list[Path]:
    """Return the log folders of this user's jobs in the temporary folder, the latest first."""
    parent = Path(tempfile.gettempdir(), f"deepspeed-{os.getuid()}")
    with contextlib.suppress(OSError):
        if not parent.is_symlink() and parent.stat().st_uid == os.getuid():
            return _by_age(parent)
    return []


def _by_age(parent: Path) -> list[Path]:
    return sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)


TAIL_BYTES = 64 * 1024
LAST_LINES = 20
LOG_BYTES = 64 << 20
"""Maximum size of a log file; the full file is then renamed to `NAME.1`."""
READ_BYTES = 1 << 20
"""Maximum bytes that one stream forwards before the other streams' turn."""
_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = re.compile(rb"(During handling of the above exception|The above exception was the direct cause of)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_WHOLE_LINES = re.compile(rb".*[\r\n]", re.DOTALL)


Size = tuple[int, int]
"""Rows and columns of a terminal."""


def terminal_size(descriptor: int) -> Size | None:
    """Return (rows, columns) of the terminal at `descriptor`; None if it is not a terminal."""
    if not os.isatty(descriptor):
        return None
    columns, rows = os.get_terminal_size(descriptor)
    return rows, columns


def open_channel(terminal: Size | None) -> tuple[int, int]:
    """Return connected descriptors (non-blocking reader, writer) for a rank's output.

    The writer is a pseudo-terminal of the size `terminal`, because progress bars adapt to terminals; None: a pipe.
    """
    if terminal is None:
        reader, writer = os.pipe()
    else:
        reader, writer = os.openpty()
        tty.setraw(writer)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", *terminal, 0, 0))
    os.set_blocking(reader, False)
    return reader, writer


class Log:
    """Log file of a rank's output, rotated at `LOG_BYTES`. After an error, such as a full disk, writes are dropped.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            if self._bytes + len(data) > LOG_BYTES:
                self.close()
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._file, self._bytes = self.path.open("wb", buffering=0), 0
            self._file.write(data)
            self._bytes += len(data)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class Stream:
    """One output of a rank (standard output or error).

    Args:
        reader: non-blocking descriptor to read from.
        emit: function that shows bytes.
        prefix: bytes before each shown line; empty: bytes are shown unchanged.
        log: file that stores the output; None: it is not stored.
    """

    def __init__(
        self, reader: int, emit: Callable[[bytes], object], prefix: bytes = b"", log: Log | BinaryIO | None = None
    ) -> None:
        self.reader = reader
        self.traceback_at: float | None = None
        self._emit = emit
        self._prefix = prefix
        self._log = log
        self._tail = b""
        self._unfinished = b""

    def pump(self) -> bool:
        """Read and process available bytes, at most `READ_BYTES`; return False at the end of the output, else True."""
        for _ in range(READ_BYTES // TAIL_BYTES):
            try:
                data = os.read(self.reader, TAIL_BYTES)
            except BlockingIOError:
                return True
            except OSError:  # a terminal whose other side is closed answers with an error instead of an end
                return False
            if not data:
                return False
            self._take(data)
        return True

    def close(self) -> None:
        self.pump()  # not for ever: what the rank started may still write
        if self._unfinished:
            self._emit(self._prefix + self._unfinished + b"\n")
        os.close(self.reader)

    def last_traceback(self) -> str:
        """Return the last traceback with its chained exceptions or, without a traceback, the last lines."""
        text = self._tail
        start = text.rfind(_TRACEBACK)
        if start < 0:
            return self.last_lines()
        while (earlier := text.rfind(_TRACEBACK, 0, start)) >= 0 and _CHAINED.search(text, earlier, start):
            start = earlier
        return _RANK_PREFIX.sub("", text[start:].decode(errors="replace"))

    def last_lines(self) -> str:
        return "\n".join(self._tail.decode(errors="replace").splitlines()[-LAST_LINES:])

    def _take(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if _TRACEBACK in self._tail[-len(data) - len(_TRACEBACK) :]:
            self.traceback_at = time.monotonic()
        if self._log is not None:
            self._log.write(data)
        if not self._prefix:
            self._emit(data)
            return
        self._unfinished += data
        if whole := _WHOLE_LINES.match(self._unfinished):
            self._unfinished = self._unfinished[whole.end() :]
            self._emit(b"".join(self._prefix + line for line in whole[0].splitlines(keepends=True)))
