"""Trials: runs of a few updates of a plan, in separate processes, with limits of time and memory.

A trial always returns a result: its measurements, or the reason for its failure.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

LOOK_S = 0.1  # between two measurements of a trial's memory
GRACE_S = 3.0  # between SIGTERM and SIGKILL, and between the figures and the end of the ranks
METRICS, CONFIG = "metrics.json", "ds_config.json"
_LEFT = 256 << 20  # bytes of the machine's memory that no trial may take
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class TrialLimits:
    """Limits of a trial.

    Args:
        seconds: time from start to results.
        memory: maximum bytes of one rank's processes, including the interpreter; shared pages count proportionally.
            0: no limit.
        exact: count shared pages proportionally at every poll, not only above the limit; this slows the ranks.
    """

    seconds: float = 120.0
    memory: int = 0
    exact: bool = False


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial.

    Args:
        seconds: seconds of an update; None: not measured.
        reason: reason for a failure; "" otherwise.
        metrics: measurements, with the keys of metrics.json.
        took: seconds from start to end of the trial.
        held: peak bytes observed on one rank.
        out_of_memory: whether the trial failed for lack of memory.
    """

    seconds: float | None
    reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    took: float = 0.0
    held: int = 0
    out_of_memory: bool = False


class TrialProcess(Protocol):
    """A trial's first process, in the form of `subprocess.Popen`; the ranks are its descendants."""

    pid: int

    @property
    def returncode(self) -> Any:
        """Return the exit code; None while the process runs."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> Any: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class TrialStarter(Protocol):
    """Interface of objects that start trials; `Command` is the built-in implementation."""

    def line(self, config: str) -> list[str]:
        """Return the command line for display; `config` is the path of the trial's JSON."""
        ...

    def start(self, config: str, out: Any, err: Any) -> TrialProcess: ...


@dataclass(frozen=True)
class Command:
    """Command that starts trials with the launcher.

    Args:
        options: the launcher's options, such as `--num_gpus 2`.
        program: the script and its arguments; `{config}` is replaced by the trial's JSON.
    """

    options: Sequence[str]
    program: Sequence[str]

    def line(self, config: str) -> list[str]:
        """Return the command line; `config` is the path of the trial's JSON."""
        script = [word.replace("{config}", config) for word in self.program]
        return [sys.executable, "-m", "deepspeed.launcher.runner", *self.options, *script]

    def start(self, config: str, out: Any, err: Any) -> subprocess.Popen[bytes]:
        """Start the launcher in its own session, so that Ctrl-C reaches only this process; `out`, `err` are files."""
        line = self.line(config)
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)


def trial_config(config: dict[str, Any], folder: Path, first: int = 3, last: int = 5) -> dict[str, Any]:
    """Return a plan's configuration with an `autotuning` block that measures updates.

    The updates `first` to `last` are measured; the results are written to `folder`.
    """
    block = {"enabled": True, "metric_path": str(folder / METRICS)}
    return {**config, "autotuning": {**block, "start_profile_step": first, "end_profile_step": max(first, last)}}


def run_trial(command: TrialStarter, config: dict[str, Any], folder: Path, limits: TrialLimits) -> TrialOutcome:
    """Run a trial with a configuration of `trial_config`, and wait for its end; a failure is in the result's `reason`.

    The trial writes ds_config.json, cmd.txt, stdout.log, stderr.log and metrics.json to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).unlink(missing_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    path = str((folder / CONFIG).absolute())
    (folder / "cmd.txt").write_text(shlex.join(command.line(path)) + "\n")
    begun = time.monotonic()
    with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
        with _Watched(command.start(path, out, err)) as watched:
            reason = watched.until(begun + limits.seconds, limits, folder / METRICS)
    took, held = time.monotonic() - begun, max(watched.held.values(), default=0)
    with suppress(OSError, ValueError):
        metrics = json.loads((folder / METRICS).read_text())
        if metrics["latency"] > 0:
            return TrialOutcome(metrics["latency"] / 1e6, "", metrics, took, held)
    lines = [line.strip() for line in (folder / "stderr.log").read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if "stopped by SIGTERM" not in line]  # the signal is ours
    errors = [line for line in lines if "Error" in line.split(" ")[0] and line[0].isalpha()]
    first = [line for line in lines if "failed first" in line]
    code, words = watched.process.returncode, (errors or first or lines or [""])[-1]
    if not reason and code == 0:
        reason = "it ended by itself before the last measured update (end_profile_step), so nothing was measured"
    reason = reason or f"it ended with exit code {code}: {words}"
    if watched.timed_out and words:
        reason = f"{reason}; the last it said: {words}"
    spent = watched.over_memory or any(word in reason for word in _OF_MEMORY)
    return TrialOutcome(None, reason[:500], {}, took, held, spent)


_OF_MEMORY = ("MemoryExhaustedError", "MemoryError", "out of memory", "can't allocate memory", "out-of-memory killer")


class _Watched:
    """Processes of a trial: the first one and its descendants. They are killed when the context ends.

    Attributes:
        held: peak bytes observed on each rank.
        over_memory, timed_out: whether the limit of memory or time ended the trial.
    """

    def __init__(self, process: TrialProcess) -> None:
        self.process = process
        self.held: dict[int, int] = {}
        self.over_memory = self.timed_out = False
        self._seen: dict[int, psutil.Process] = {}
        self._ranks: dict[int, int | None] = {}  # by session

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def until(self, end: float, limits: TrialLimits, metrics: Path) -> str:
        """Wait until the trial ends or exceeds a limit; returns a message on that limit, or "".

        `end` is in seconds of `time.monotonic`.

        After the file `metrics` exists, the ranks have a short time to end by themselves.
        """
        measured = False
        while self.process.poll() is None:
            time.sleep(LOOK_S)
            self._look()
            before = dict(self.held)
            reason = "" if measured else self._too_much(limits.memory, limits.exact)
            if not measured and metrics.exists():
                # Ranks are ending: pages that they shared with an ended rank count fully for the remaining ones.
                measured, end, self.held, reason = True, min(end, time.monotonic() + GRACE_S), before, ""
            if reason:
                self.over_memory = True
                return reason
            if time.monotonic() > end:
                self.timed_out = not measured
                return "" if measured else f"no figures within {limits.seconds:g} s: it hung, or is that slow"
        return ""

    def _look(self) -> None:
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[process.pid] = process

    def _too_much(self, allowed: int, exact: bool) -> str:
        left = psutil.virtual_memory().available
        held: dict[int, list[int]] = {}
        for pid in [pid for pid, process in self._seen.items() if process.is_running()]:
            with suppress(OSError):
                rank = self._rank(os.getsid(pid))
                if rank is not None:
                    held.setdefault(rank, []).append(pid)
        for rank, pids in held.items():
            size = self._bytes_held(pids, 0 if exact else max(allowed, self.held.get(rank, 0)))
            self.held[rank] = max(size, self.held.get(rank, 0))
            if allowed and size > allowed:
                for pid in pids:
                    with suppress(psutil.Error):
                        self._seen[pid].kill()
                return f"out of memory: rank {rank} held {size / 2**20:,.0f} MiB of {allowed / 2**20:,.0f} allowed"
        if left < _LEFT and held:
            return f"out of memory: the machine had {left / 2**20:,.0f} MiB left"
        return ""

    @staticmethod
    def _bytes_held(pids: list[int], enough: int) -> int:
        """Return the bytes of processes; shared pages count proportionally only if the sum is above `enough`."""
        total = 0
        for pid in pids:
            with suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        if total <= enough:
            return total
        total = 0
        for pid in pids:
            with suppress(OSError, IndexError):
                total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) << 10
        return total

    def _rank(self, session: int) -> int | None:
        """Return the rank of a session, from its first process's environment or name (`RANK=N`); None: unknown yet."""
        if session not in self._ranks:
            rank = None
            with suppress(OSError, ValueError):
                words = Path(f"/proc/{session}/environ").read_bytes().split(b"\0")
                words.append(Path(f"/proc/{session}/comm").read_bytes())
                rank = next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
            if rank is None:
                return None  # it may not be a rank yet
            self._ranks[session] = rank
        return self._ranks[session]

    def end(self) -> None:
        """Kill the remaining processes of the trial."""
        self._look()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            self._look()
        left = [process for process in self._seen.values() if process.is_running()]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        psutil.wait_procs(left, GRACE_S)
