"""Foreground process: shows the output and forwards signals while another process runs the job.

Ctrl-S, Ctrl-Z, a pipe without a reader or a full disk block only this process.
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
    """Return the end of the text shown on standard error."""
    return _last_errors.decode(errors="replace")


class Screen:
    """A file whose text is sent to the front process, which writes it to its own descriptor 1 or 2."""

    def __init__(self, channel: Channel, descriptor: int) -> None:
        self._channel = channel
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        self._channel.send("out", text.encode(errors="replace"), to=self._descriptor)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` sends immediately."""

    def isatty(self) -> bool:
        """Return whether the front's descriptor is a terminal."""
        return os.isatty(self._descriptor)


def run_behind(work: Callable[[Channel], int]) -> int:
    """Run `work` in a separate process, detached from the terminal, and show its output.

    `work` gets a channel that delivers signal numbers (`signal`) and accepts output (`out`). Returns its exit code, or
    1 if the process was killed.
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
    """Write to a stream unless its reader has ended. With a full disk, the text is lost but the job continues."""
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
