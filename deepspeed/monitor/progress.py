"""Live progress line of a run: step, loss, samples per second, remaining time, memory.

A thread draws the line from a few fields that the loop sets, so the loop waits neither for the terminal nor for the
loss on its device. Without a terminal, a plain line is written every ten seconds by default.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from deepspeed.foundation.progress_line import LIVE_S, PLAIN_S, clock, is_live, write_line

_RATE_S = 15.0  # the rate is measured over these seconds


class Progress:
    """Progress line of one rank, drawn until `close`.

    Args:
        memory: function that returns the bytes in use; called in the drawing thread.
        total: number of batches to come; None: unknown.
        stream: target of the line; None: the current standard error.
        every: seconds between two lines; None: 0.25 on a terminal, 10 otherwise.
    """

    def __init__(
        self,
        memory: Callable[[], int],
        total: int | None = None,
        stream: TextIO | None = None,
        every: float | None = None,
    ) -> None:
        self._memory, self._total, self._stream, self._every = memory, total, stream, every
        self._loss: Any = None  # a number, or a tensor that may not be computed yet
        self._updates, self._batches = 0, 0
        self._seen: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])  # when: batches, samples
        self._samples = 0
        self._drawn, self._changed = False, False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="deepspeed-progress", daemon=True)
        self._thread.start()

    # -- called by the loop; each is some assignments --------------------------------------------------------------

    def on_loss(self, loss: Any) -> None:
        """Store a loss, a number or one-element tensor, which is read when the next line is drawn."""
        self._loss = loss

    def on_batch(self) -> None:
        """Count a batch."""
        self._batches += 1

    def on_update(self, updates: int, samples: int) -> None:
        """Record an update: the number of updates so far, and the samples of this one over all ranks."""
        self._updates, self._samples = updates, self._samples + samples
        self._changed = True
        self._seen.append((time.monotonic(), self._batches, self._samples))
        while len(self._seen) > 2 and self._seen[-1][0] - self._seen[0][0] > _RATE_S:
            self._seen.popleft()

    def close(self) -> None:
        """Draw the last line and stop; waits at most 2 s for a blocked terminal."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join(timeout=2.0)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            while not self._over.wait(self._pause()):
                if self._changed:
                    self._show()
            if self._changed or self._drawn:
                self._show(last=True)

    def _pause(self) -> float:
        return self._every if self._every is not None else LIVE_S if is_live(self._stream) else PLAIN_S

    def _show(self, last: bool = False) -> None:
        live = is_live(self._stream)
        if not live and last and not self._changed:
            return
        self._changed = False
        write_line(self.line(), self._stream, last)
        self._drawn = live and not last

    def line(self) -> str:
        """Return the current text of the line."""
        parts = [f"step {self._updates:,}"]
        if self._loss is not None:
            parts.append(f"loss {float(self._loss):.4g}")
        (since, _, before), (until, _, after) = self._seen[0], self._seen[-1]
        if until > since:
            parts.append(f"{(after - before) / (until - since):,.4g} samples/s")
        left = self._left()
        if left is not None:
            parts.append(f"{clock(left)} left")
        return " · ".join([*parts, f"{self._memory() / 2**20:,.0f} MiB"])

    def _left(self) -> float | None:
        """Return the seconds until the last batch at the recent rate; None if this is unknown."""
        (since, before, _), (until, done, _) = self._seen[0], self._seen[-1]
        if self._total is None or done <= before:
            return None
        return max(0, self._total - done) * (until - since) / (done - before)
