"""Single-threaded event loop for descriptors and timers, and a socket for signals."""

from __future__ import annotations

import contextlib
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from deepspeed.errors import LaunchError

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals of a user or scheduler that are forwarded to the job's ranks."""
OWN_DESCRIPTORS = 64
"""Maximum of open descriptors besides those of the hosts."""


def make_room(descriptors: int) -> None:
    """Ensure that this process may open `descriptors` files for hosts: raise its soft limit, often 1,024, if necessary.

    Raises:
        LaunchError: the system does not allow that many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors + OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise LaunchError(
            f"so many hosts need {needed} open files in the launcher, and {hard} are allowed: "
            "raise the hard limit (`ulimit -Hn`, LimitNOFILE=), or start with --launcher pdsh, which needs half as many"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Loop:
    """Event loop: `turn` calls the actions of readable descriptors and expired timers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[float, Callable[[], object]]] = []

    def watch(self, descriptor: int, action: Callable[[], object]) -> None:
        """Register `action` to be called whenever `descriptor` is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def unwatch(self, descriptor: int) -> None:
        """Remove the action of a descriptor; unknown descriptors are ignored."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def turn(self, timeout: float) -> None:
        """Wait for an event, at most `timeout` seconds, and call the actions that are due."""
        soonest = min((moment for moment, _ in self._due), default=float("inf")) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(timeout, soonest))):
            if key.fd in self._selector.get_map():  # an earlier one may have closed it
                key.data()
        now = time.monotonic()
        due = [action for moment, action in self._due if moment <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for action in due:
            action()

    def close(self) -> None:
        """Drop all timers and descriptors."""
        self._due.clear()
        self._selector.close()


@contextlib.contextmanager
def signal_socket(numbers: Sequence[int]) -> Iterator[socket.socket]:
    """Context with a socket that receives the numbers of signals as bytes, for these signals and SIGCHLD.

    Signals that this process ignores stay ignored. Handlers are restored on exit.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    watched = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in (*watched, signal.SIGCHLD)}
    old_writer = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    writer.send(bytes([signal.SIGCHLD]))  # a child may have ended before
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old_writer)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
