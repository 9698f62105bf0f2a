"""Warns before the container's memory limit is reached.

A process alone in a container with a limit is ended by SIGKILL when it touches one page too many; no allocation fails
before. So a thread looks at what is left, the more often the less there is, and says once what the thread that trains
is doing, what is held, and which key would help.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from deepspeed.engine.memory.report import MemoryReport
from deepspeed.foundation.cgroup import CgroupMemory
from deepspeed.foundation.log import logger

_LEAST, _SHARE = 64 << 20, 0.1  # left of the limit, in bytes and as a part: then it is time to speak
_PACE = 8 << 30  # bytes a second that a process is thought to take at most
_LONGEST_S, _SHORTEST_S = 0.25, 0.004


class MemoryWatchdog:
    """A thread that speaks when a container's memory is nearly used up; without a limit there is none.

    Args:
        report: what an engine holds.
        container: whose limit counts.
    """

    def __init__(self, report: MemoryReport, container: CgroupMemory | None = None) -> None:
        self._container = container or CgroupMemory()
        self._limit = self._container.limit()
        self._ended, self._thread = threading.Event(), None
        if self._limit:
            arguments = (weakref.ref(self), weakref.ref(report), threading.get_ident(), self._ended)
            self._thread = threading.Thread(target=_look, args=arguments, name="deepspeed-pressure", daemon=True)
            self._thread.start()

    @property
    def left(self) -> int:
        """Bytes that the container still allows."""
        return self._limit - self._container.used()

    @property
    def scarce(self) -> float:
        """Bytes under which memory is nearly used up."""
        return max(_LEAST, _SHARE * self._limit)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


def _look(
    watch: weakref.ref[MemoryWatchdog], report: weakref.ref[MemoryReport], trains: int, ended: threading.Event
) -> None:
    """Look until the end, or until nobody holds the engine any more."""
    warned = False
    while True:
        here, held = watch(), report()
        if here is None or held is None:
            return
        left, scarce = here.left, here.scarce
        if left < scarce and not warned:
            warned = True
            logger.warning(held.running_out(list(_stack(sys._current_frames().get(trains))), left))
        warned = warned and left < 2 * scarce
        del here, held
        if ended.wait(min(_LONGEST_S, max(_SHORTEST_S, (left - scarce) / _PACE))):
            return


def _stack(frame: Any) -> Iterator[Any]:
    """Frames of a thread, outermost first."""
    lines = []
    while frame is not None:
        lines.append(frame)
        frame = frame.f_back
    return reversed(lines)
