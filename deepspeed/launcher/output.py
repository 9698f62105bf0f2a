"""What a rank prints: passed on as it comes, kept in a file when asked, its end remembered for the failure report."""

from __future__ import annotations

import os
import re
import time
import tty
from typing import BinaryIO

TAIL_BYTES = 64 * 1024
LAST_LINES = 20
_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = re.compile(rb"(During handling of the above exception|The above exception was the direct cause of)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_WHOLE_LINES = re.compile(rb".*[\r\n]", re.DOTALL)


def open_channel(like: int) -> tuple[int, int]:
    """A (reader, writer) pair that looks to the writer like the descriptor `like`: a terminal or a pipe.

    Progress bars ask whether they write to a terminal and how wide it is.
    """
    if not os.isatty(like):
        reader, writer = os.pipe()
    else:
        reader, writer = os.openpty()
        tty.setraw(writer)
        _copy_size(like, writer)
    os.set_blocking(reader, False)
    return reader, writer


def _copy_size(source: int, target: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8)))


class Stream:
    """One output of a rank on its way from the rank's pipe to the launcher's own output.

    Args:
        reader: non-blocking descriptor that the rank's writes arrive at.
        sink: descriptor they are passed on to.
        prefix: put before each line; empty passes bytes on as they come.
        log: file that takes them too.
    """

    def __init__(self, reader: int, sink: int, prefix: bytes = b"", log: BinaryIO | None = None) -> None:
        self.reader = reader
        self.traceback_at: float | None = None
        self._sink = sink
        self._prefix = prefix
        self._log = log
        self._tail = b""
        self._unfinished = b""

    def pump(self) -> bool:
        """Pass on what has arrived; False when the rank's side is closed."""
        while True:
            try:
                data = os.read(self.reader, TAIL_BYTES)
            except BlockingIOError:
                return True
            except OSError:  # a terminal whose other side is closed answers with an error instead of an end
                return False
            if not data:
                return False
            self._take(data)

    def close(self) -> None:
        """Pass on what is left and release the descriptor."""
        self.pump()
        if self._unfinished:
            self._emit(self._prefix + self._unfinished + b"\n")
        os.close(self.reader)

    def last_traceback(self) -> str:
        """The last traceback with the exceptions it is chained to; the last lines when it is no longer remembered."""
        text = self._tail
        start = text.rfind(_TRACEBACK)
        if start < 0:
            return self.last_lines()
        while (earlier := text.rfind(_TRACEBACK, 0, start)) >= 0 and _CHAINED.search(text, earlier, start):
            start = earlier
        return _RANK_PREFIX.sub("", text[start:].decode(errors="replace"))

    def last_lines(self) -> str:
        """What was printed last."""
        return "\n".join(self._tail.decode(errors="replace").splitlines()[-LAST_LINES:])

    def _take(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if _TRACEBACK in self._tail[-len(data) - len(_TRACEBACK) :]:
            self.traceback_at = time.monotonic()
        if self._log is not None:
            self._log.write(data)
        if not self._prefix:
            return self._emit(data)
        self._unfinished += data
        if whole := _WHOLE_LINES.match(self._unfinished):
            self._unfinished = self._unfinished[whole.end() :]
            self._emit(b"".join(self._prefix + line for line in whole[0].splitlines(keepends=True)))

    def _emit(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._sink, data) :]
