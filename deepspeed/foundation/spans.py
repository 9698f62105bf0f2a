"""Recorder of spans (timed activities of this process) in a ring buffer; one branch per span when it is off.

Times are nanoseconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

# What a thread does. Spans of one thread nest: the innermost counts.
FORWARD, BACKWARD, RECOMPUTE, UPDATE, STEP = "forward", "backward", "recompute", "update", "step"
CALL, WAIT, REDUCE = "call", "wait", "reduce"  # a message is started; is waited for; what arrived is taken in
DISK, COPY, LOADER, SAVE = "disk", "copy", "loader", "save"
# What goes on beside it, and may overlap anything: a message from start to end, a transfer to or from a disk.
FLIGHT, TRANSFER = "flight", "transfer"
_OF_MESSAGES = frozenset((CALL, WAIT, REDUCE, FLIGHT))  # their labels say what for: `all_gather of layers.1.weight`
COUNT = "count"  # a number at a moment: `nbytes` is its value


class Span(NamedTuple):
    """Timed activity.

    Attributes:
        begin, end: nanoseconds of the clock `now`.
        category: one of the constants of this module, such as `FORWARD`.
        label: name in reports.
        module: name of the module or group, or ""; for a message, the text after "of" in its label.
        nbytes: received bytes, or the value of a count.
        thread: thread of this process that recorded the span.
    """

    begin: int
    end: int
    category: str
    label: str
    module: str
    nbytes: int
    thread: int


now = time.monotonic_ns
"""Nanoseconds of the recorder's clock."""


class _Open:
    """Context that records its span when it ends."""

    __slots__ = ("_recorder", "_what", "_begin")

    def __init__(self, recorder: SpanRecorder, what: tuple[str, str, str, int]) -> None:
        self._recorder, self._what = recorder, what

    def __enter__(self) -> None:
        self._begin = now()

    def __exit__(self, *_: object) -> None:
        self._recorder.add(self._begin, *self._what)


_thread = threading.get_ident
_NOTHING: AbstractContextManager[None] = nullcontext()
_Written = tuple[int, int, str, str, str, int, int]  # a span that nobody has taken yet


class _Threads(threading.local):
    """Open spans of each thread."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, str, str]] = []


def _drop(_written: _Written) -> None:
    """Discard a span."""


class SpanRecorder:
    """Ring buffer of this process's newest spans; any thread may write.

    Attributes:
        on: whether spans are recorded. Callers check this attribute first.
    """

    def __init__(self) -> None:
        self.on = False
        self._ring: deque[_Written] = deque()
        self._keep: Callable[[_Written], None] = _drop
        self._count = itertools.count()
        self._open = _Threads()

    def start(self, size: int = 1 << 16) -> None:
        """Start recording, and drop older spans.

        Args:
            size: maximum number of spans; the newest are kept.
        """
        self._ring, self._count, self._open = deque(maxlen=size), itertools.count(), _Threads()
        self._keep = self._ring.append
        self.on = True

    def stop(self) -> None:
        """Stop recording; the recorded spans are kept for `take`."""
        self.on = False

    def take(self) -> tuple[list[Span], int]:
        """Remove and return the spans, sorted by begin, and the number of older spans that were dropped."""
        self._keep, ring, self._ring = _drop, list(self._ring), deque()
        written, self._count = next(self._count), itertools.count()
        spans = sorted(Span(*written) for written in ring)
        spans = [_with_module(span) if span.category in _OF_MESSAGES and not span.module else span for span in spans]
        return spans, max(0, written - len(ring))

    def add(self, begin: int, category: str, label: str = "", module: str = "", nbytes: int = 0) -> None:
        """Record a span that ends now, with the fields of `Span`; do nothing while the recorder is off."""
        if self.on:  # what can wait until spans are taken does: this is run thousands of times a second
            self._keep((begin, now(), category, label, module, nbytes, _thread()))
            next(self._count)

    def count(self, label: str, value: int) -> None:
        """Record the current value of the counter `label`."""
        if self.on:
            self.add(now(), COUNT, label, nbytes=value)

    def span(self, category: str, label: str = "", module: str = "", nbytes: int = 0) -> AbstractContextManager[None]:
        """Return a context that records a span from its start to its end, with the fields of `Span`."""
        return _Open(self, (category, label, module, nbytes)) if self.on else _NOTHING

    def enter(self, category: str, label: str) -> None:
        """Begin a span, which the matching `leave` of this thread ends."""
        self._open.entered.append((now(), category, label))

    def leave(self) -> None:
        """End the span of this thread's last `enter`; a span that began before `start` is not recorded."""
        entered = self._open.entered
        if entered:
            self.add(*entered.pop())


def _with_module(span: Span) -> Span:
    return span._replace(module=span.label.partition(" of ")[2])


recorder = SpanRecorder()  # of this process
