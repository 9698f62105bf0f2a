"""Times of a micro-batch and of its window, by the names that scripts look for, and the lines that show them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from deepspeed.foundation.timer import SynchronizedWallClockTimer

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"

FORWARD, BACKWARD, BACKWARD_INNER, BACKWARD_REDUCE, STEP = (
    "forward", "backward", "backward_inner", "backward_allreduce", "step",
)  # fmt: skip
# What is timed: the timer of a micro-batch and that of a window.
_PAIRS = {
    FORWARD: (FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER),
    BACKWARD: (BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER),
    BACKWARD_INNER: (BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER),
    BACKWARD_REDUCE: (BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER),
    STEP: (STEP_MICRO_TIMER, STEP_GLOBAL_TIMER),
}


class StepTimers:
    """Two stopwatches for each part of a step: of the micro-batch, and of the window it belongs to.

    `backward_inner` is autograd alone, `backward_allreduce` the wait, within `step`, for gradients that were still on
    their way when backward was over: what overlapped with it has no time of its own.

    Args:
        timers: where the stopwatches are.
        active: measure; else nothing waits for the device, and nothing is said.
        says: a line after each micro-batch, and one after each window, on rank 0.

    Attributes:
        last: milliseconds by name of the last window and its last micro-batch; empty before.
    """

    def __init__(self, timers: SynchronizedWallClockTimer, active: bool, says: bool) -> None:
        self._timers, self.active, self._says = timers, active, says
        self.last: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Inside, a part of the step runs; a part within itself counts once."""
        pair = [self._timers(name) for name in _PAIRS[part]]
        if not self.active or pair[0].started_:
            yield
            return
        for timer in pair:
            timer.start()
        try:
            yield
        finally:  # a caller may go on after an error
            for timer in reversed(pair):
                timer.stop()

    def elapsed(self) -> dict[str, float]:
        """Milliseconds of the window so far, by part; those that have not run are left out."""
        names = ((part, pair[1]) for part, pair in _PAIRS.items())
        return {part: self._timers(name).elapsed(reset=False) for part, name in names if self._timers.has_timer(name)}

    def end_micro_batch(self) -> None:
        """A micro-batch is over."""
        if self.active:
            self._show(0)

    def end_window(self) -> dict[str, float]:
        """A window is over, and its last micro-batch; gives `elapsed()` of it."""
        if not self.active:
            return {}
        found = self.elapsed()
        timers = [self._timers(name) for pair in _PAIRS.values() for name in pair]
        self.last = {timer.name_: timer.elapsed(reset=False) for timer in timers}
        self._show(0)
        self._show(1)
        return found

    def _show(self, which: int) -> None:
        """A line of the micro-batch's (0) or the window's (1) timers, which begin anew."""
        names = [pair[which] for pair in _PAIRS.values()]
        if self._says:
            for name in names:
                self._timers(name)  # what has not run shows as 0.00
            self._timers.log(names)
        else:
            for name in names:
                self._timers(name).elapsed(reset=True)
