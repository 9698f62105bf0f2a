"""Wall-clock timers by name and a samples-per-second meter; the caller passes a function to wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.foundation.log import log_dist


def trimmed_mean(values: Sequence[float], share: float = 0.1) -> float:
    """The mean without the largest and the smallest `share` of the values; 0 of none."""
    cut = int(len(values) * share)
    middle = sorted(values)[cut : len(values) - cut] if cut else values
    return sum(middle) / len(middle) if middle else 0.0


def _no_wait() -> None:
    """The default `synchronize`: for devices that are always synchronized."""


class Timer:
    """One stopwatch; times are in milliseconds.

    Args:
        name: what it measures.
        synchronize: waits until the device has finished what it was given.
    """

    def __init__(self, name: str, synchronize: Callable[[], None] = _no_wait) -> None:
        self.name_ = name
        self.started_ = False
        self._synchronize = synchronize
        self._begun = 0.0
        self._elapsed = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Begin to measure.

        Raises:
            UsageError: it runs already.
        """
        if self.started_:
            raise UsageError(f"timer '{self.name_}' runs already; stop() it before the next start()")
        self._synchronize()
        self._begun = time.perf_counter()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the measurement that `start` began; nothing happens when it does not run.

        Args:
            reset: forget what was measured before.
            record: let this measurement count in `mean`.
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
        """Milliseconds measured so far; a running timer goes on."""
        running = self.started_
        self.stop()
        elapsed = self._elapsed
        if reset:
            self._elapsed = 0.0
        if running:
            self.start()
        return elapsed

    def mean(self) -> float:
        """Mean of the recorded measurements in milliseconds, without the tenth at either end; 0 without any."""
        return trimmed_mean(self._records)


class HostWallClockTimer:
    """Timers by name: `timers("forward").start()`.

    Args:
        synchronize: waits until the device has finished what it was given.
    """

    def __init__(self, synchronize: Callable[[], None] = _no_wait) -> None:
        self.timers: dict[str, Timer] = {}
        self._synchronize = synchronize

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name, self._synchronize))

    def get_timers(self) -> dict[str, Timer]:
        """All timers by name."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether a timer of that name was ever asked for."""
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
            names: timers to show; those never used are left out.
            normalizer: divides every figure.
            reset: set them back to zero.
            memory_breakdown: with what `memory_usage` says.
            ranks: ranks that log, rank 0 when None.

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
        """What the device holds, in one line; "" where no device is known."""
        return ""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean **microseconds** of what the named timers recorded, divided by `normalizer`; `reset` forgets it."""
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
    """Stands in for HostWallClockTimer where nothing is to be measured."""

    def __call__(self, name: str) -> Timer:
        return _NO_TIMER

    def log(self, names: Iterable[str], *args: object, **kwargs: object) -> None:
        """Say nothing."""


_NO_TIMER = _NoTimer("none")


class ThroughputMeter:
    """Samples per second, over all ranks, from the step after `start_step` on.

    Args:
        batch_size: samples of one global step, over all ranks.
        start_step: steps to leave out as warm-up.
        steps_per_output: global steps between two log lines; None or 0 logs none.
        synchronize: waits until the device has finished what it was given; None where nobody waits for it.
        enabled: measure.
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
        """A new epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-step begins; one that has begun goes on."""
        if self._enabled and self._begun is None and self.global_step_count >= self.start_step:
            self._synchronize()
            self._begun = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-step ends.

        Args:
            global_step: it was the last of its window, the optimizer has stepped.
            report_speed: log the figures when `steps_per_output` says so.
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
        """Log the figures.

        Args:
            now: samples per second of the last step.
        """
        average = self.avg_samples_per_sec()
        log_dist(f"step {self.global_step_count}: {average:.2f} samples/s on average, {now:.2f} samples/s now", [0])

    def avg_samples_per_sec(self) -> float:
        """Mean since the warm-up; 0 before its end."""
        steps = self.global_step_count - self.start_step
        return steps * self.batch_size / max(self.total_elapsed_time, 1e-9) if steps > 0 else 0.0
