"""Metrics of an engine: monitor events, step timers, the FLOPs profiler and autotuner trials."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from deepspeed.accelerator.instruments import ThroughputTimer, see_memory_usage
from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.collectives import SMALL
from deepspeed.comm.collectives.encoded import error_sample
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import tag_of
from deepspeed.engine.accessors import StateAccessors
from deepspeed.engine.client_support import loss_is_divided
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.expert_balance import ExpertBalance
from deepspeed.engine.memory.report import MemoryGuard, MemoryReport, MemoryWatchdog, allocated
from deepspeed.engine.nan_detector import NonFiniteFinder
from deepspeed.engine.rollout_report import RolloutReport
from deepspeed.engine.timeline import Tracing
from deepspeed.foundation import progress_line
from deepspeed.foundation.spans import recorder
from deepspeed.foundation.timer import HostWallClockTimer
from deepspeed.monitor import progress
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.zero.gradients.accumulation import Purpose
from deepspeed.zero.gradients.grad_norm import squares_by_name
from deepspeed.zero.gradients.reducer import Reducer

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"

FORWARD, BACKWARD, BACKWARD_INNER, BACKWARD_REDUCE, STEP = (
    "forward", "backward", "backward_inner", "backward_allreduce", "step",
)  # fmt: skip
# Parts of a step: the timer of a micro-batch and that of a window.
_PAIRS = {
    FORWARD: (FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER),
    BACKWARD: (BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER),
    BACKWARD_INNER: (BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER),
    BACKWARD_REDUCE: (BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER),
    STEP: (STEP_MICRO_TIMER, STEP_GLOBAL_TIMER),
}


def tokens_in(inputs: Iterable[Any]) -> int:
    """Return the size of the first tensor of integers with two or more dims, also in dicts; 0 if there is none."""
    for value in inputs:
        if isinstance(value, dict):
            tokens = tokens_in(value.values())
            if tokens:
                return tokens
        elif isinstance(value, torch.Tensor) and value.dim() > 1:
            if not value.dtype.is_floating_point and value.dtype != torch.bool:
                return value.numel()
    return 0


class StepTimers:
    """Two timers for each part of a step: one per micro-batch, and one per window.

    `backward_inner` is autograd alone. `backward_allreduce` is the wait in `step` for gradients that are still being
    reduced after backward; reductions that overlap with backward have no time of their own.

    Args:
        timers: the timers by name.
        active: measure; otherwise there is no synchronization and no output.
        says: log a line after each micro-batch and each window, on rank 0.

    Attributes:
        last: milliseconds by name of the timer, of the last update and its last micro-batch; empty before.
    """

    def __init__(self, timers: HostWallClockTimer, active: bool, says: bool) -> None:
        self._timers, self.active, self._says = timers, active, says
        self.last: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time the block as a part of a step ("forward", "backward", …); nested blocks of the same part count once."""
        pair = [self._timers(name) for name in _PAIRS[part]]
        if not self.active or pair[0].started_:
            yield
            return
        for timer in pair:
            timer.start()
        try:
            yield
        finally:  # the caller may continue after an error
            for timer in reversed(pair):
                timer.stop()

    def elapsed(self) -> dict[str, float]:
        """Return the milliseconds since the last update, by part of a step; parts that never ran may be missing."""
        names = ((part, pair[1]) for part, pair in _PAIRS.items())
        return {part: self._timers(name).elapsed(reset=False) for part, name in names if self._timers.has_timer(name)}

    def end_micro_batch(self) -> None:
        if self.active:
            self._show(0)

    def end_window(self) -> dict[str, float]:
        """End an update and its last micro-batch; returns the update's `elapsed()`, {} if nothing is measured."""
        if not self.active:
            return {}
        elapsed = self.elapsed()
        timers = [self._timers(name) for pair in _PAIRS.values() for name in pair]
        self.last = {timer.name_: timer.elapsed(reset=False) for timer in timers}
        self._show(0)
        self._show(1)
        return elapsed

    def _show(self, which: int) -> None:
        """Log the timers of the micro-batch (0) or the window (1), and reset them."""
        names = [pair[which] for pair in _PAIRS.values()]
        if self._says:
            for name in names:
                self._timers(name)  # a part that has not run is logged as 0.00
            self._timers.log(names)
        else:
            for name in names:
                self._timers(name).elapsed(reset=True)


class Profiling:
    """FLOPs profile of the update `profile_step`, counted from 0, with a report for each of its micro-batches.

    Operations are counted in the first micro-batch of the preceding update, since counting takes time. A micro-batch
    of the profiled update whose inputs have other shapes is counted itself.

    Args:
        elapsed: returns the milliseconds since the last update, by part of a step.
    """

    def __init__(self, state: EngineState, engine: Any, elapsed: Callable[[], dict[str, float]]) -> None:
        self._state, self._section = state, state.ds_config.flops_profiler_config
        here = self._section.enabled and state.axes.everyone.rank == 0
        self.profiler = FlopsProfiler(state.module, engine) if here else None
        self._shapes: list[Any] | None = None  # shapes of the inputs whose operations were counted
        self._elapsed = elapsed
        self._before: dict[str, float] = {}
        self._due = False  # a report is to be printed once the step has a time

    def on_forward(self, inputs: Any) -> None:
        ahead = self._section.profile_step - self._state.global_steps
        if self.profiler is None or self.profiler.started or ahead not in (0, 1):
            return
        leaves = tree_leaves(inputs)
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]
        if shapes == self._shapes:
            if ahead:
                return
            self.profiler.start_timing()
        elif not ahead or self._shapes is None:
            self.profiler.start_profile()
            self._shapes = shapes
        self._before = self._elapsed()

    def on_step(self, boundary: bool) -> None:
        if self.profiler is not None and self.profiler.started:
            self.profiler.stop_profile()
            self._due = self._state.global_steps == self._section.profile_step
            if self._due and not boundary:
                self._print()

    def after_update(self) -> None:
        if self._due:
            self._print()

    def close(self) -> None:
        if self.profiler is not None:
            self.profiler.stop_profile()

    def _print(self) -> None:
        profiler, section, self._due = self.profiler, self._section, False
        if profiler is not None:
            since = ((name, total - self._before.get(name, 0.0)) for name, total in self._elapsed().items())
            profiler.times = {name: milliseconds / 1e3 for name, milliseconds in since}
            profiler.print_model_profile(
                section.profile_step, section.module_depth, section.top_modules, section.detailed, section.output_file
            )


class Trial:
    """Trial run of the autotuner: times the updates that the `autotuning` block selects, then ends the process."""

    def __init__(self, state: EngineState, facts: StateAccessors) -> None:
        self._state, self._facts, self._section = state, facts, state.ds_config.top.autotuning
        self.active = self._section.enabled and self._section.metric_path is not None
        self._since = time.perf_counter()
        self._spent: Counter[str] = Counter()  # milliseconds by part of a step, of the timed updates
        self._done = 0  # updates of this process; `global_steps` also counts those before a loaded checkpoint

    def after_update(self, samples: int, times: dict[str, float]) -> None:
        """Count an update; after the last one, write `autotuning.metric_path` and raise SystemExit(0) on all ranks.

        Args:
            samples: samples of the update over all ranks.
            times: milliseconds by part of a step.
        """
        if not self.active:
            return
        self._done += 1
        first = self._section.start_profile_step
        if self._done == first - 1:
            self._since, self._spent = time.perf_counter(), Counter()
            return
        self._spent.update(times)
        if self._done >= max(first, self._section.end_profile_step):
            self._end(self._done - first + 1, samples)

    def _end(self, updates: int, samples: int) -> None:
        seconds = (time.perf_counter() - self._since) / updates
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        timings = all_gather_objects(self._state.everyone, (seconds, peak))  # also waits for the slowest rank
        if self._state.everyone.rank == 0:
            slowest = max(seconds_of_rank for seconds_of_rank, _ in timings)
            metrics = {**self._parts(updates), "latency": slowest * 1e6, "throughput": samples / slowest, "rank": 0}
            metrics["peak_resident"] = max(bytes_of_rank for _, bytes_of_rank in timings)
            path = Path(str(self._section.metric_path))
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_text(json.dumps(metrics, indent=2) + "\n")
            part.replace(path)  # readers see the whole file or none
        raise SystemExit(0)

    def _parts(self, updates: int) -> dict[str, float]:
        """Return the microseconds of forward and backward per micro-batch, and of the step per update."""
        turns = self._state.window.steps
        each = {name: self._spent[name] * 1e3 / updates for name in (FORWARD, BACKWARD, STEP)}
        return {"fwd": each[FORWARD] / turns, "bwd": each[BACKWARD] / turns, "step": each[STEP]}


_NOTHING = nullcontext()
_NONE: Mapping[str, float] = MappingProxyType({})
_SAMPLES, _MEMORY, _MS = "Train/Samples/", "Train/Memory/", "elapsed_time_ms_"


class Instruments:
    """Measurements of each update, and their output to monitors, log and progress line.

    Attributes:
        throughput: samples per second over all ranks, from forward to the end of `step`, from the third update on,
            without synchronization of the device and without log lines.
    """

    def __init__(self, state: EngineState, engine: StateAccessors, balance: ExpertBalance) -> None:
        self._state, self._facts, self._balance = state, engine, balance
        self.monitor = MonitorMaster(state.ds_config.monitor_config, state.everyone.rank)
        self.profiling = Profiling(state, engine, lambda: self.times.elapsed())
        self._memory = MemoryReport(state)
        self.guard = partial(MemoryGuard, self._memory, _NOTHING)  # adds a report to out-of-memory errors inside
        self.rollouts = RolloutReport(state)
        self._pressure = MemoryWatchdog(self._memory)
        self.tracing = Tracing(state, self._memory)
        self._finder = NonFiniteFinder(state, engine)
        self._trial = Trial(state, engine)
        self._collects = self.monitor.enabled or self._finder.enabled
        profiled = state.ds_config.wall_clock_breakdown or state.ds_config.flops_profiler_config.enabled
        says = state.ds_config.wall_clock_breakdown
        self.times = StepTimers(state.timers, profiled or self._trial.active, says)
        unwaited = state.ds_config.timers.throughput.model_copy(update={"synchronized": False})
        self.throughput = ThroughputTimer(unwaited, self._facts.train_batch_size())
        self._loss: torch.Tensor | None = None
        self._metrics = _NONE
        self._weight, self._tokens = 0.0, 0
        self._since: float | None = None  # when the window began
        self._elapsed: dict[str, float] = {}
        self._channel, self._asked = state.axes.model_replica_group.channel(), 0
        self._names: tuple[list[str], list[str]] = ([], [])  # parameter names of this rank, and of the whole model
        self.progress: progress.Progress | None = None  # on rank 0 while a line is shown
        self._after_update = self._hooks()
        if progress_line.requested():
            self.start_progress(None)

    def _hooks(self) -> list[Callable[[list[list[float]], int], None]]:
        """Return the active callbacks after an update, in order; arguments: `row` of each rank, samples over ranks."""
        hooks: list[tuple[bool, Callable[[list[list[float]], int], None]]] = [
            (self.profiling.profiler is not None, lambda _rows, _samples: self.profiling.after_update()),
            (self._finder.enabled, lambda _rows, _samples: self._finder.forget()),
            (self.tracing.enabled, lambda _rows, _samples: self._balance.count()),
            (self.tracing.enabled, lambda _rows, _samples: self.tracing.after_update()),
            (self.times.active, self._end_times),
            (self.progress is not None, self._show_progress),
            (self.monitor.enabled, self._write_events),
        ]
        return [hook for is_on, hook in hooks if is_on]

    def start_progress(self, batches: int | None) -> None:
        """Show a live progress line on rank 0; `batches`: number of remaining batches, None if unknown."""
        self.stop_progress()
        if self._state.everyone.rank == 0:
            device = self._state.device
            self.progress = progress.Progress(lambda: allocated(device), batches)
            self._after_update = self._hooks()

    def stop_progress(self) -> None:
        shown, self.progress = self.progress, None
        if shown is not None:
            self._after_update = self._hooks()
            shown.close()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Create a context that times a part of a step, such as "forward", in the timers and the span recorder."""
        watched = self.times.active or self._state.ds_config.memory_breakdown
        inner = self._watched(name) if watched else recorder.span(name) if recorder.on else _NOTHING
        return MemoryGuard(self._memory, inner, name == FORWARD and self._memory.left_by_forward < 0)

    def _waiting(self) -> AbstractContextManager[None]:
        """Create a context that times the wait for pending gradients."""
        return self.times.timed(BACKWARD_REDUCE)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of the last update and its last micro-batch, by the names of `deepspeed.utils.timer`.

        Empty unless `wall_clock_breakdown` (or a profiler) measures. The timers themselves are `engine.timers`.
        """
        return dict(self.times.last)

    def inner(self) -> AbstractContextManager[None]:
        """Create a context that times autograd inside backward."""
        return self.times.timed(BACKWARD_INNER) if self.times.active else _NOTHING

    def memory_by_category(self) -> dict[str, int]:
        """Return this rank's bytes of memory by category; see `MemoryReport.by_category`."""
        return self._memory.by_category()

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        shows, reducer = self._state.ds_config.memory_breakdown, self._state.components.reducer
        if reducer is not None and self.times.active:  # each time, since a new layout has a new reducer
            reducer.time_waits(self._waiting)
        see_memory_usage(f"before {name}", force=shows)
        with self.times.timed(name), recorder.span(name):
            yield
        see_memory_usage(f"after {name}", force=shows)

    # -- the window -----------------------------------------------------------------------------------------------

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.throughput.start()
        if self.profiling.profiler is not None:
            self.profiling.on_forward((args, kwargs))
        if self.progress is not None:
            self.progress.on_batch()
        if self._finder.enabled:
            self._finder.on_forward(args, kwargs)
        if self.monitor.enabled:
            self._since = self._since or time.perf_counter()
            self._tokens += tokens_in([kwargs.get("input_ids"), *args, *kwargs.values()])

    def on_loss(self, loss: torch.Tensor, num_items: float | None) -> None:
        """Record the loss of a micro-batch: a mean over samples (`num_items` None), or a sum over `num_items` items."""
        if self._finder.enabled:
            self._finder.on_loss(loss, self._state.window.loss_scale)
        if self.progress is not None:
            shown = loss.detach()
            self.progress.on_loss(shown / num_items if num_items else shown)
        if self._collects:
            window, share = self._state.window, 1.0
            if num_items is None and loss_is_divided(self._state.module):
                share = 1.0 / window.steps  # the client has divided the loss
            samples = 1.0 if window.samples is None else window.samples
            weighted_loss = loss.detach().double() * samples
            self._loss = weighted_loss if self._loss is None else self._loss + weighted_loss
            self._weight += num_items if num_items is not None else samples * share

    def on_window(
        self, loss: torch.Tensor, batches: Sequence[Any], stages: int, metrics: Mapping[str, float] = _NONE
    ) -> None:
        """Record the micro-batches of an update in a pipeline.

        Args:
            loss: their mean loss.
            batches: the micro-batches of this rank.
            stages: number of stages, which read the same batches.
            metrics: means of the model's own metrics, by name.
        """
        if self.progress is not None:
            self.progress.on_loss(loss.detach())
        if self.monitor.enabled:
            self._since = self._since or time.perf_counter()
            self._loss, self._weight, self._metrics = loss.double(), 1.0, metrics
            nests = [batch if isinstance(batch, (list, tuple)) else [batch] for batch in batches]
            self._tokens += stages * sum(tokens_in(nest) for nest in nests)

    def on_step(self, boundary: bool) -> bool:
        """Record the end of a micro-batch; returns `boundary`, which is true if an update follows."""
        if self.profiling.profiler is not None:
            self.profiling.on_step(boundary)
        if not boundary:
            self.times.end_micro_batch()
            self.throughput.stop()
        return boundary

    def row(self) -> list[float]:
        """Return and reset this rank's sums since the last update: loss, weight, tokens; [] if nothing needs them."""
        if not self._collects:
            return []
        loss = 0.0 if self._loss is None else scalars.current.value(self._loss)
        row = [loss, self._weight, float(self._tokens)]
        self._loss, self._weight, self._tokens = None, 0.0, 0
        return row

    def after_update(self, rows: list[list[float]], samples: int) -> None:
        """Run the active callbacks after an update; `rows`: `row` of each rank, `samples`: samples over all ranks."""
        self.throughput.batch_size = samples
        self.throughput.stop(global_step=True, report_speed=False)
        for hook in self._after_update:
            hook(rows, samples)

    def _end_times(self, _rows: list[list[float]], samples: int) -> None:
        self._elapsed = self.times.end_window()
        self._trial.after_update(samples, self._elapsed)

    def _show_progress(self, _rows: list[list[float]], samples: int) -> None:
        if self.progress is not None:
            self.progress.on_update(self._state.global_steps, samples)

    def _write_events(self, rows: list[list[float]], samples: int) -> None:
        state, now = self._state, time.perf_counter()
        seconds, self._since = now - (self._since or now), now
        self._tell(seconds)
        if self.monitor.writes:
            of_update = [*self._of_update(), *self._times(), *self._balance.events(), *self.rollouts.events()]
            events = [*self._of_window(rows, samples, seconds), *of_update]
            self.monitor.write_events([(name, value, state.global_samples) for name, value in events])

    def _tell(self, seconds: float, **more: Any) -> None:
        """Publish this rank's figures for `ds_top`."""
        state = self._state
        facts = {"host": socket.gethostname(), "update": state.global_steps, "seconds": seconds}
        facts |= {"samples": state.global_samples, "skipped": state.skipped_steps}
        norm = self._facts.get_global_grad_norm()
        if norm is not None and math.isfinite(norm):
            facts["gradient norm"] = norm
        facts |= {"experts": summary} if (summary := self._balance.summary()) else {}
        self.monitor.tell({**facts, "memory": self._memory.by_category(), **more})

    def _of_window(self, rows: list[list[float]], samples: int, seconds: float) -> Iterator[tuple[str, float]]:
        loss, weight, tokens = (sum(column) for column in zip(*rows, strict=True))
        if weight:
            yield f"{_SAMPLES}train_loss", loss / weight
        yield from ((f"{_SAMPLES}{name}", value) for name, value in self._metrics.items())
        if seconds > 0:
            yield f"{_SAMPLES}samples_per_second", samples / seconds
            if tokens:  # tensor-parallel ranks count the same tokens
                yield f"{_SAMPLES}tokens_per_second", tokens / len(rows) * self._state.axes.dp_sp_group.size / seconds

    def _of_update(self) -> Iterator[tuple[str, float]]:
        rates, norm = self._facts.get_lr(), self._facts.get_global_grad_norm()
        if rates:
            yield f"{_SAMPLES}lr", rates[0]
        if norm is not None:
            yield f"{_SAMPLES}grad_norm", norm
        yield f"{_SAMPLES}loss_scale", self._facts.loss_scale()
        yield f"{_SAMPLES}skipped_steps", self._state.skipped_steps
        if (error := error_sample.take()) is not None:
            yield f"{_SAMPLES}wire_error", error
        yield from ((f"{_MEMORY}{kind}", count) for kind, count in self._memory.by_category().items())

    def _times(self) -> Iterator[tuple[str, float]]:
        """Yield (name, milliseconds) of the parts of the last update for the monitors, if they are measured."""
        yield from ((f"{_SAMPLES}{_MS}{part}", value) for part, value in self._elapsed.items())

    # -- gradients by name ----------------------------------------------------------------------------------------

    def gradient_norms(self) -> dict[str, float]:
        """Compute the L2 norm of each parameter's gradient accumulated since the last update, before clipping.

        All ranks must call this between `backward` and `step`. With tensor parallelism, a norm covers all slices.

        Returns:
            Norms by parameter name, in the model's order; parameters for which no rank has a gradient are missing.

        Raises:
            UsageError: the engine has no optimizer, or ranks have made different calls.
        """
        optimizer, reducer = self._state.components.optimizer, self._state.components.reducer
        if optimizer is None or reducer is None:
            raise self._state.components.without_optimizer("gradient_norms")
        agreed = reducer.finish(Purpose.REDUCE)
        squares_of, factor = squares_by_name(reducer), abs(self._state.window.rescale(agreed))
        names = self._all_names(reducer)
        self._asked += 1
        tag, axis = tag_of(self._channel, SMALL, self._asked), self._state.axes.model_replica_group
        row = [squares_of.get(name, -1.0) for name in names]  # below 0: no gradient here
        row.append(reducer.squares.own(reducer.revision) or 0.0)
        table = scalars.current.table(axis, row, tag, "agreement on gradient norms by name", reducer.device)
        reducer.squares.total = sum(rank_row.pop() for rank_row in table)
        columns = dict(zip(names, zip(*table, strict=True), strict=True))
        touched = {name: [square for square in column if not square < 0] for name, column in columns.items()}
        return {name: sum(squares) ** 0.5 * factor for name, squares in touched.items() if squares}

    def _all_names(self, reducer: Reducer) -> list[str]:
        """Return the names of all parameters of one model copy, in the same order on all ranks. Collective."""
        members = sorted((m for b in reducer.buckets for m in b.group.members), key=lambda member: member.place)
        local_names = [member.name for member in members]
        axis = self._state.axes.model_replica_group
        if not self._state.sliced or axis.group is None:
            return local_names
        if local_names != self._names[0]:
            names_by_rank = all_gather_objects(axis, local_names)
            self._names = local_names, list(dict.fromkeys(name for names in names_by_rank for name in names))
        return self._names[1]

    def close(self) -> None:
        self.stop_progress()
        self.profiling.close()
        self.tracing.close()
        self._pressure.close()
        self._finder.close()
        if self.monitor.enabled:
            self._tell(0.0, ended=True)
        if self.monitor.writes:
            error_sample.stop()  # a later engine's first update has no error of this one
        self.monitor.close()
