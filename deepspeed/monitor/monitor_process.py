"""Process that writes a monitor's events, and the pipe to it.

The process reads lines of JSON from standard input: first the configuration block, its values and a time limit; then
lists of events. An empty line, or the end of the input if the run was killed, ends the process. A thread reads the
lines, so the run never waits for a package that imports, blocks or contacts a server.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, BinaryIO

from deepspeed.foundation.log import log_rank0
from deepspeed.monitor.base import Event
from deepspeed.monitor.registry import monitor_class

LIMIT = 30.0  # seconds that a writer has to write the rest, once the run has ended
_PIPE = 1 << 20  # bytes that the kernel takes while the writer is busy
_PENDING = 1 << 24  # bytes that wait in this process when the pipe is full
_TAIL, _SHOWN = 4096, 300  # of a writer's output: bytes that are read when it ends, characters that are shown


class Feed:
    """Sender of events to the writer process of one monitor.

    If the writer fails, the run logs a warning and continues without it. The writer's standard output and error go to
    an unnamed temporary file.

    Args:
        block: name of the block in the configuration.
        settings: values of the block.
    """

    def __init__(self, block: str, settings: dict[str, Any]) -> None:
        self.block, self._run = block, os.getpid()
        self._pending, self._lost = bytearray(), 0
        self._output = tempfile.TemporaryFile()
        self._writer: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", "deepspeed.monitor.monitor_process"],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C, or the end of the run's group, must not cost the last events
        )
        self._pipe = self._writer.stdin.fileno() if self._writer.stdin is not None else -1
        os.set_blocking(self._pipe, False)
        with suppress(AttributeError, OSError):  # else the pipe keeps its size
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE)
        self.send(json.dumps([block, settings, LIMIT]).encode() + b"\n")

    def send(self, line: bytes) -> None:
        """Send a line of JSON without waiting; if the pipe is full, up to 16 MiB wait, and further lines are lost."""
        if self._writer is None or os.getpid() != self._run:  # a forked data loader worker has no monitor
            return
        if len(self._pending) + len(line) > _PENDING:
            if not self._lost:
                self._warn("does not keep up, and loses events from here on")
            self._lost += 1
        else:
            self._pending += line
        try:
            while self._pending:
                del self._pending[: os.write(self._pipe, self._pending)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(1.0, "has closed its input")

    def close(self, limit: float | None = None) -> None:
        """Wait until the writer has written all events and ended; it is killed after `limit` seconds (None: 30)."""
        limit = LIMIT if limit is None else limit
        if os.getpid() != self._run:
            return
        deadline = time.monotonic() + limit
        self.send(b"\n")
        while self._pending and self._writer is not None and time.monotonic() < deadline:
            time.sleep(0.01)
            self.send(b"")
        if self._writer is not None:
            self._end(deadline - time.monotonic(), f"did not finish within {limit:g} s; its last events are lost")

    def _end(self, limit: float, complaint: str) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if writer.stdin is not None:
            writer.stdin.close()
        try:
            failed = writer.wait(max(limit, 0.1)) != 0
            complaint = f"has stopped: {self._last_words()}"
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            self._end_group(writer)
            self._warn(complaint)
        self._output.close()

    @staticmethod
    def close_all(feeds: list[Feed]) -> None:
        """Close feeds in parallel, within about 30 s, and empty the list."""
        deadline = time.monotonic() + LIMIT
        for feed in feeds:
            feed.send(b"\n")
        for feed in feeds:
            feed.close(max(1.0, deadline - time.monotonic()))
        feeds.clear()

    @staticmethod
    def _end_group(writer: subprocess.Popen[bytes]) -> None:
        """Kill a writer that hangs, with the processes that its package has started."""
        with suppress(OSError):  # already ended
            os.killpg(writer.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # blocked in the kernel, for example by a dead file server
            writer.wait(1.0)

    def _last_words(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace").split("\n")
        return next((line for line in reversed(tail) if line.strip()), "it said nothing").strip()[:_SHOWN]

    def _warn(self, what: str) -> None:
        log_rank0(f"the monitor {self.block} {what}; training goes on", logging.WARNING)


def _read_lines(lines: BinaryIO, limit: float, queue: SimpleQueue[list[Any] | None]) -> None:
    for line in iter(lines.readline, b""):
        if not line.strip():
            break
        if line.endswith(b"\n"):  # else the run was killed in the middle of it
            queue.put(json.loads(line))
    # The alarm's default action ends the process even if the interpreter is blocked.
    signal.setitimer(signal.ITIMER_REAL, limit)
    queue.put(None)


def _serve(lines: BinaryIO) -> None:
    block, settings, limit = json.loads(lines.readline())
    queue: SimpleQueue[list[Any] | None] = SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines, limit, queue), daemon=True).start()
    monitor = monitor_class(block)(SimpleNamespace(**settings))
    batches: list[list[Any] | None] = []
    while not batches or batches[-1] is not None:
        batches = [queue.get()]
        with suppress(Empty):
            while batches[-1] is not None:
                batches.append(queue.get_nowait())
        events = [Event(*event) for batch in batches if batch is not None for event in batch]
        if events:
            monitor.write(events)
    monitor.close()


if __name__ == "__main__":
    status = 0
    try:
        _serve(sys.stdin.buffer)
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # does not wait for threads of the package
