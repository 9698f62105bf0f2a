"""A run that is a planner's trial: some updates are timed, the figures are written, and the ranks end."""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deepspeed.comm.api import told_by_all
from deepspeed.engine.accessors import StateAccessors
from deepspeed.engine.state import EngineState
from deepspeed.engine.step_timers import BACKWARD, FORWARD, STEP


class Trial:
    """Times updates `start_profile_step` to `end_profile_step` of the `autotuning` block, then ends this process.

    Args:
        state: of the engine.
        facts: answers about it.

    Attributes:
        active: whether this run is a trial: the block is enabled and says where the figures go.
    """

    def __init__(self, state: EngineState, facts: StateAccessors) -> None:
        self._state, self._facts, self._section = state, facts, state.ds_config.top.autotuning
        self.active = self._section.enabled and self._section.metric_path is not None
        self._since = time.perf_counter()
        self._spent: Counter[str] = Counter()  # milliseconds by part, of the updates that are timed
        self._done = 0  # here: a script that goes on from a checkpoint begins with `global_steps` above 0

    def after_update(self, samples: int, times: dict[str, float]) -> None:
        """An update is over.

        Args:
            samples: of it, over all ranks.
            times: milliseconds of its parts.

        Raises:
            SystemExit: with code 0, on all ranks alike, after the last timed update.
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
        told = told_by_all(self._state.everyone, (seconds, peak))  # nobody ends while a neighbour still needs it
        if self._state.everyone.rank == 0:
            slowest = max(one for one, _ in told)
            found = {**self._parts(updates), "latency": slowest * 1e6, "throughput": samples / slowest, "rank": 0}
            _write(Path(str(self._section.metric_path)), {**found, "peak_resident": max(held for _, held in told)})
        raise SystemExit(0)

    def _parts(self, updates: int) -> dict[str, float]:
        """Microseconds of forward and backward of a micro-batch, and of the step."""
        turns = self._state.window.steps
        each = {name: self._spent[name] * 1e3 / updates for name in (FORWARD, BACKWARD, STEP)}
        return {"fwd": each[FORWARD] / turns, "bwd": each[BACKWARD] / turns, "step": each[STEP]}


def _write(path: Path, found: dict[str, Any]) -> None:
    """Whoever waits for the file sees it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(found, indent=2) + "\n")
    part.replace(path)
