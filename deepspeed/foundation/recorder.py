"""What this process does and when: spans in a ring, written where labels are held anyway. Off, it is one branch.

Times are nanoseconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

# What a thread does. Spans of one thread nest: the innermost counts.
FORWARD, BACKWARD, RECOMPUTE, UPDATE, STEP = "forward", "backward", "recompute", "update", "step"
CALL, WAIT, REDUCE = "call", "wait", "reduce"  # a message is started; is waited for; what arrived is taken in
DISK, COPY, LOADER, SAVE = "disk", "copy", "loader", "save"
# What goes on beside it, and may overlap anything: a message from start to end, a transfer to or from a disk.
FLIGHT, TRANSFER = "flight", "transfer"
COUNT = "count"  # a number at a moment: `nbytes` is its value


class Span(NamedTuple):
    """Something that took a while.

    Attributes:
        begin, end: nanoseconds.
        category: one of those above.
        label: what, as reports call it.
        module: name of the module or group it belongs to; may be empty.
        nbytes: bytes that came from elsewhere, or the value of a count.
        thread: of this process that wrote it.
    """

    begin: int
    end: int
    category: str
    label: str
    module: str
    nbytes: int
    thread: int


def now() -> int:
    """Nanoseconds of the recorder's clock."""
    return time.monotonic_ns()


class _Open:
    """A span that has begun, as a context."""

    __slots__ = ("_recorder", "_what", "_begin")

    def __init__(self, recorder: Recorder, what: tuple[str, str, str, int]) -> None:
        self._recorder, self._what = recorder, what

    def __enter__(self) -> None:
        self._begin = now()

    def __exit__(self, *_: object) -> None:
        self._recorder.add(self._begin, *self._what)


_NOTHING: AbstractContextManager[None] = nullcontext()


class Recorder:
    """The newest spans of this process; any thread may write.

    Attributes:
        on: whether spans are kept. Whoever writes looks here first.
    """

    def __init__(self) -> None:
        self.on = False
        self._ring: list[Span | None] = []
        self._places = itertools.count()
        self._open = threading.local()

    def start(self, size: int = 1 << 16) -> None:
        """Keep spans from now on, and forget older ones.

        Args:
            size: most spans that are kept, the newest.
        """
        ring: list[Span | None] = [None] * size
        self._ring, self._places, self._open = ring, itertools.count(), threading.local()
        self.on = True

    def stop(self) -> None:
        """Keep no more; what there is can be taken."""
        self.on = False

    def take(self) -> tuple[list[Span], int]:
        """The spans by begin, and how many did not fit; they are forgotten here."""
        ring, self._ring = self._ring, []
        written = next(self._places)
        return sorted(span for span in ring if span is not None), max(0, written - len(ring))

    def add(self, begin: int, category: str, label: str = "", module: str = "", nbytes: int = 0) -> None:
        """A span that ends now; nothing happens while the recorder is off."""
        if self.on:
            span = Span(begin, now(), category, label, module, nbytes, threading.get_ident())
            ring = self._ring
            if ring:
                ring[next(self._places) % len(ring)] = span

    def count(self, label: str, value: int) -> None:
        """A number as it is now."""
        if self.on:
            self.add(now(), COUNT, label, nbytes=value)

    def span(self, category: str, label: str = "", module: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
        """A context that is a span."""
        return _Open(self, (category, label, module, nbytes)) if self.on else _NOTHING

    def enter(self, category: str, label: str) -> None:
        """A span begins that this thread's next `leave` ends."""
        entered: list[tuple[int, str, str]] | None = getattr(self._open, "entered", None)
        if entered is None:
            entered = self._open.entered = []
        entered.append((now(), category, label))

    def leave(self) -> None:
        """The span of this thread's last `enter` ends; one that began before `start` is left out."""
        entered: list[tuple[int, str, str]] = getattr(self._open, "entered", [])
        if entered:
            begin, category, label = entered.pop()
            self.add(begin, category, label, label.partition(" of ")[2])


recorder = Recorder()  # of this process
