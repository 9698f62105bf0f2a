"""Signals and the ends of children as bytes of a socket, so that one wait sees everything."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def signal_socket(numbers: Sequence[int]) -> Iterator[socket.socket]:
    """A socket that receives the number of each of these signals and of SIGCHLD; one that is ignored stays ignored."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    watched = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in (*watched, signal.SIGCHLD)}
    old_writer = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    writer.send(bytes([signal.SIGCHLD]))  # a child may have ended before this stood
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old_writer)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
