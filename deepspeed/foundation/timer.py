"""Named wall-clock timers and a samples-per-second meter; the caller supplies a function that waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.foundation.log import log_dist


def trimmed_mean(values: Sequence[float], share: float = 0.1) -> float:
    """Return the mean without the fractions `share` of smallest and of largest values; 0 if there are no values."""
    cut = int(len(values) * share)
    middle = sorted(values)[cut : len(values) - cut] if cut else values
    return sum(middle) / len(middle) if middle else 0.0


def _no_wait() -> None:
    """Do nothing; the default of `synchronize`, for devices without asynchronous work."""


class Timer:
    """Timer that accumulates milliseconds between `start` and `stop`.

    Args:
        name: name in error messages.
        synchronize: function that waits for pending device work.
    """

    def __init__(self, name: str, synchronize: Callable[[], None] = _no_wait) -> None:
        self.name_ = name
        self.started_ = False
        self._synchronize = synchronize
        self._begun = 0.0
        self._elapsed = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Start the timer.

        Raises:
            UsageError: the timer is already running.
        """
        if self.started_:
            raise UsageError(f"timer '{self.name_}' runs already; stop() it before the next start()")
        self._synchronize()
        self._begun = time.perf_counter()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the timer; a timer that is not running is ignored.

        Args:
            reset: whether `elapsed` forgets earlier measurements.
            record: whether `mean` includes this measurement.
        """
        if not self.started_:
            return
        self._synchronize()
        took = (time.perf_counter() - self._begun) * 1e3
        self._elapsed = took if reset else self._elapsed + took
        if record:
            self._records.append(took)
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self._elapsed = 0.0
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the accumulated milliseconds, and set them to 0 if `reset`; a running timer continues."""
        running = self.started_
        self.stop()
        elapsed = self._elapsed
        if reset:
            self._elapsed = 0.0
        if running:
            self.start()
        return elapsed

    def mean(self) -> float:
        """Return the mean in milliseconds without the smallest and the largest 10% of the records; 0 if none."""
        return trimmed_mean(self._records)


class HostWallClockTimer:
    """Collection of named timers: `timers("forward").start()`.

    Args:
        synchronize: function that waits for pending device work.
    """

    def __init__(self, synchronize: Callable[[], None] = _no_wait) -> None:
        self.timers: dict[str, Timer] = {}
        self._synchronize = synchronize

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name, self._synchronize))

    def get_timers(self) -> dict[str, Timer]:
        """Return all timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Return whether a timer of that name exists."""
        return name in self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Log one line with the milliseconds of the named timers.

        Args:
            names: timers to show; names without a timer are omitted.
            normalizer: divisor of the milliseconds, such as a number of steps.
            reset: whether the timers are set to 0.
            memory_breakdown: whether the text of `memory_usage` is added.
            ranks: ranks that log; None: rank 0.

        Raises:
            ArgumentError: the normalizer is not above 0.
        """
        if normalizer <= 0:
            raise ArgumentError(f"normalizer is {normalizer}; figures are divided by it, so it must be above 0")
        figures = [f"{n}: {self.timers[n].elapsed(reset) / normalizer:.2f}" for n in names if n in self.timers]
        line = "time (ms) | " + " | ".join(figures)
        log_dist(f"{line} | {self.memory_usage()}" if memory_breakdown else line, ranks=ranks or [0])

    @staticmethod
    def memory_usage() -> str:
        """Return the text for `memory_breakdown`: "" here; subclasses describe the device's memory."""
        return ""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean **microseconds** of the named timers, divided by `normalizer`; `reset` clears the timers."""
        means = {name: self.timers[name].mean() * 1e3 / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class _NoTimer(Timer):
    def start(self) -> None:
        """Do nothing."""

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Do nothing."""


class NoopTimer(HostWallClockTimer):
    """Replacement for HostWallClockTimer that measures nothing."""

    def __call__(self, name: str) -> Timer:
        return _NO_TIMER

    def log(self, names: Iterable[str], *args: object, **kwargs: object) -> None:
        """Do nothing."""


_NO_TIMER = _NoTimer("none")


class ThroughputMeter:
    """Meter of samples per second over all ranks.

    Args:
        batch_size: samples of one global step, over all ranks.
        start_step: number of warm-up steps that are not measured.
        steps_per_output: global steps between two log lines; None or 0: no log lines.
        synchronize: function that waits for pending device work; None: the meter does not wait.
        enabled: False: `start` and `stop` do nothing.
    """

    def __init__(
        self,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        synchronize: Callable[[], None] | None = None,
        enabled: bool = True,
    ) -> None:
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._step_time = 0.0
        self._synchronize = synchronize or _no_wait
        self._enabled = enabled
        self._begun: float | None = None

    def update_epoch_count(self) -> None:
        """Count a new epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start a micro-step; do nothing if one is running, or during the warm-up."""
        if self._enabled and self._begun is None and self.global_step_count >= self.start_step:
            self._synchronize()
            self._begun = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step.

        Args:
            global_step: whether the optimizer has stepped after this micro-step.
            report_speed: whether the speed may be logged, every `steps_per_output` global steps.
        """
        if not self._enabled:
            return
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._begun is None:
            return
        self._synchronize()
        took = time.perf_counter() - self._begun
        self._begun = None
        self.total_elapsed_time += took
        self._step_time += took
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self.say(self.batch_size / max(self._step_time, 1e-9))
            self._step_time = 0.0

    def say(self, now: float) -> None:
        """Log the average and the current speed on rank 0.

        Args:
            now: samples per second in the last step.
        """
        average = self.avg_samples_per_sec()
        log_dist(f"step {self.global_step_count}: {average:.2f} samples/s on average, {now:.2f} samples/s now", [0])

    def avg_samples_per_sec(self) -> float:
        """Return the mean samples per second since the warm-up; 0 before its end."""
        steps = self.global_step_count - self.start_step
        return steps * self.batch_size / max(self.total_elapsed_time, 1e-9) if steps > 0 else 0.0
