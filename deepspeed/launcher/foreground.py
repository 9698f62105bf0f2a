"""Foreground process: shows the output and forwards signals, while a second process runs the job.

So Ctrl-S, Ctrl-Z, a pipe without a reader or a full disk cannot block the job itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from deepspeed.launcher.channel import Channel
from deepspeed.launcher.event_loop import FORWARDED_SIGNALS

LOST = 1
"""Exit code if the process that ran the job was killed."""
LAST_BYTES = 16384
"""Bytes of error output that are kept for a report."""

_last_errors = bytearray()


def last_errors() -> str:
    """Return the last `LAST_BYTES` bytes that were shown on standard error, as text."""
    return _last_errors.decode(errors="replace")


class Screen:
    """File object for output that the foreground process writes to its standard output or error.

    Args:
        channel: channel to the foreground process.
        descriptor: 1 (standard output) or 2 (standard error).
    """

    def __init__(self, channel: Channel, descriptor: int) -> None:
        self._channel = channel
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        self._channel.send("out", text.encode(errors="replace"), to=self._descriptor)
        return len(text)

    def flush(self) -> None:
        """Return without effect; `write` does not buffer text."""

    def isatty(self) -> bool:
        """Whether the output is a terminal."""
        return os.isatty(self._descriptor)


def run_behind(work: Callable[[Channel], int]) -> int:
    """Run a function in a forked process, detached from the terminal, and show its output.

    Args:
        work: function that returns an exit code. Its argument is a channel that delivers messages `signal` with signal
            numbers, and to which messages `out` with output are sent.

    Returns:
        Exit code of `work`, or 1 if `work` raised an error or its process was killed.
    """
    parent_end, child_end = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        parent_end.close()
        channel, code = Channel(descriptor := child_end.detach(), descriptor), LOST
        try:
            os.setsid()
            sys.stdout = Screen(channel, 1)  # pyright: ignore[reportAttributeAccessIssue]
            sys.stderr = Screen(channel, 2)  # pyright: ignore[reportAttributeAccessIssue]
            code = work(channel)
        except BaseException:
            traceback.print_exc()
        finally:
            channel.send("exit", code=code)
            while channel.waiting and channel.open:
                select.select([], [channel.writer], [], 1.0)
                channel.flush()
            os._exit(code)
    child_end.close()
    return _show(Channel(descriptor := parent_end.detach(), descriptor), pid)


def _show(channel: Channel, pid: int) -> int:
    def forward(number: int, _: Any) -> None:
        channel.send("signal", number=number)

    handled = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in handled}
    code, dead = LOST, set[int]()
    try:
        while channel.open:
            select.select([channel.reader], [channel.writer] if channel.waiting else [], [])
            channel.flush()
            for message, data in channel.receive():
                if message["kind"] == "exit":
                    code = message["code"]
                elif message["kind"] == "out":
                    _write_all(message["to"], data, dead)
    finally:
        channel.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return code


def _write_all(descriptor: int, data: bytes, dead: set[int]) -> None:
    """Write `data`, unless `descriptor` is in `dead`; add it to `dead` after an error other than a full disk."""
    if descriptor == 2:
        _last_errors.extend(data)
        del _last_errors[:-LAST_BYTES]
    while data and descriptor not in dead:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [], 1.0)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return
            dead.add(descriptor)
