"""Statistics of parameter all-gathers: number of calls, elements and time.

`deepspeed/profiling/timeline` shows more detail; this module is for scripts that count calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.foundation.log import log_dist
from deepspeed.foundation.saved_tensors import in_backward
from deepspeed.foundation.timer import HostWallClockTimer
from deepspeed.zero.parameters.module_hooks import ModuleHooks
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.prefetch import PrefetchScheduler


class PartitionedParameterProfiler:
    """Profiler of parameter all-gathers: counts and times events by name.

    After `watch`, the events of a stage-3 model are recorded: `forward_fetch_submit` (all-gathers that were not
    prefetched), `forward_fetch_wait` (waits for all-gathers), `forward_prefetch_submit` (prefetched all-gathers), and
    the same three with `backward_`. Other events can be recorded with `start_event` and `stop_event`.

    Args:
        timers: timers that store the times, such as `engine.timers`; None: record nothing.

    Example:
        >>> profiler = PartitionedParameterProfiler(engine.timers)
        >>> profiler.watch(engine); step(); profiler.log_events(); profiler.reset_events(); profiler.stop()
    """

    @dataclass
    class EventCounter:
        """Counter of an event: name, number of occurrences, and their total number of elements."""

        name: str
        count: int = 0
        num_elem: int = 0

        def reset(self) -> None:
            """Reset the counter to zero."""
            self.count = self.num_elem = 0

        def increment(self, numel: int) -> None:
            """Count an event of `numel` elements."""
            self.count += 1
            self.num_elem += numel

    def __init__(self, timers: HostWallClockTimer | None) -> None:
        self.timers = timers
        self.event_counters: dict[str, PartitionedParameterProfiler.EventCounter] = {}
        self._watched: list[PrefetchScheduler] = []

    def reset_events(self) -> None:
        """Reset all counts and times to zero."""
        for name, counter in self.event_counters.items():
            counter.reset()
            if self.timers is not None:
                self.timers(name).reset()

    def start_event(self, name: str) -> None:
        """Start the timer of an event of this name."""
        if self.timers is not None:
            self.event_counters.setdefault(name, self.EventCounter(name))
            self.timers(name).start()

    def stop_event(self, name: str, num_elem: int) -> None:
        """Stop the timer of an event, and count it.

        Args:
            name: name of the event.
            num_elem: number of elements to add to its total.

        Raises:
            UsageError: no event of that name is running.
        """
        if self.timers is None:
            return
        if name not in self.event_counters or not self.timers(name).started_:
            raise UsageError(f"stop_event('{name}') without start_event('{name}')")
        self.timers(name).stop()
        self.event_counters[name].increment(num_elem)

    def log_events(self) -> None:
        """Log the times and then the counts of all events on rank 0; does not reset them."""
        if self.timers is None:
            return
        self.timers.log(self.event_counters, reset=False)
        log_dist(
            "gathers (count / elements) | "
            + " | ".join(
                f"{counter.name}: {counter.count} / {counter.num_elem:,}" for counter in self.event_counters.values()
            ),
            ranks=[0],
        )

    # -- of a model ------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Record the all-gathers of a stage-3 model as events until `stop`, or until its parameters are regrouped.

        Args:
            model: engine or its module.

        Raises:
            UsageError: no parameter of the model is sharded by an engine.
        """
        groups = {param._ds_member.group for param in model.parameters() if is_managed(param)}  # type: ignore[attr-defined]
        hooks = {group.lifecycle for group in groups if isinstance(group.lifecycle, ModuleHooks)}
        if not hooks:
            raise UsageError("watch() of a model without sharded parameters; they are sharded at ZeRO stage 3")
        for prefetcher in (each.prefetcher for each in hooks):
            prefetcher.profile = self._event
            self._watched.append(prefetcher)

    def stop(self) -> None:
        """Stop recording the watched models; counts and times remain."""
        for prefetcher in self._watched:
            prefetcher.profile = None
        self._watched.clear()

    @contextlib.contextmanager
    def _event(self, name: str, elements: int) -> Iterator[None]:
        name = f"{'backward' if in_backward() else 'forward'}_{name}"
        self.start_event(name)
        try:
            yield
        finally:
            self.stop_event(name, elements)
