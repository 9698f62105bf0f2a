"""The `flops_profiler` block: rank 0 counts one micro-batch, times those of the next update, and prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from deepspeed.engine.state import EngineState
from deepspeed.profiling.flops_profiler import FlopsProfiler


def _shapes(inputs: Any) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, torch.Tensor) else type(x) for x in tree_leaves(inputs)]


class Profiling:
    """Profiles the update `profile_step`, counted from 0, with a report for each of its micro-batches.

    Operations are counted in the update before, once per shape of the inputs, since counting takes time.

    Args:
        state: of the engine.
        engine: for the report.
        elapsed: gives milliseconds of the window so far, by part.
    """

    def __init__(self, state: EngineState, engine: Any, elapsed: Callable[[], dict[str, float]]) -> None:
        self._state, self._section = state, state.ds_config.flops_profiler_config
        here = self._section.enabled and state.axes.everyone.rank == 0
        self.profiler = FlopsProfiler(state.module, engine) if here else None
        self._shapes: list[Any] | None = None  # of the inputs whose operations were counted
        self._elapsed = elapsed
        self._before: dict[str, float] = {}
        self._due = False  # a report waits for the time of the step

    def on_forward(self, inputs: Any) -> None:
        """A micro-batch begins."""
        ahead = self._section.profile_step - self._state.global_steps
        if self.profiler is None or self.profiler.started or ahead not in (0, 1):
            return
        shapes = _shapes(inputs)
        if shapes == self._shapes:
            if ahead:
                return
            self.profiler.start_timing()
        elif not ahead or self._shapes is None:
            self.profiler.start_profile()
            self._shapes = shapes
        self._before = self._elapsed()

    def on_step(self, boundary: bool) -> None:
        """A micro-batch ends.

        Args:
            boundary: an update follows.
        """
        if self.profiler is not None and self.profiler.started:
            self.profiler.stop_profile()
            self._due = self._state.global_steps == self._section.profile_step
            if self._due and not boundary:
                self._print()

    def after_update(self) -> None:
        """The step was measured as well."""
        if self._due:
            self._print()

    def close(self) -> None:
        """Count no more."""
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
