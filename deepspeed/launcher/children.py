"""Ranks as child processes that die with the launcher, whatever kills the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed.launcher.output import Stream, open_channel

FATAL_SECONDS = 30.0
"""Longest time between a traceback and the end of the process that it belongs to."""

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Rank:
    """One started rank: its process, what it prints, and how it ended.

    Args:
        number: the global rank.
        command: program and arguments.
        environment: the whole environment of the process.
        cores: CPU cores it may run on; None leaves the launcher's.
        log_path: file that takes its output too; None passes standard output on untouched.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: dict[str, str],
        cores: Sequence[int] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.number = number
        self.log_path = log_path
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.peak_memory = 0
        self._log = None if log_path is None else log_path.open("wb", buffering=0)
        prefix = b"" if log_path is None else b"[rank %d] " % number
        error_reader, error_writer = open_channel(like=2)
        self.errors = Stream(error_reader, 2, prefix, self._log)
        self.streams = [self.errors]
        output_writer = None
        if log_path is not None:
            output_reader, output_writer = open_channel(like=1)
            self.streams.append(Stream(output_reader, 1, prefix, self._log))
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=output_writer,
                stderr=error_writer,
                # A session of its own: Ctrl-C reaches the rank once, through the launcher, and the group can be killed.
                start_new_session=True,
                preexec_fn=_before_exec(os.getpid(), cores),
            )
        finally:
            for writer in filter(None, (error_writer, output_writer)):
                os.close(writer)

    def reap(self) -> bool:
        """True once, when the process has ended; its exit code, time and peak memory are then known."""
        if self.exit_code is not None:
            return False
        pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.ended_at = time.monotonic()
        self.exit_code = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_memory = usage.ru_maxrss * (1024 if sys.platform == "linux" else 1)
        return True

    def close(self) -> None:
        """Pass on what it last printed and release its streams."""
        for stream in self.streams:
            stream.close()
        if self._log is not None:
            self._log.close()

    @property
    def failed_at(self) -> float:
        """When it went wrong: its traceback comes before its end, which may take as long as freeing its memory."""
        return self._fatal_traceback_at or self.ended_at

    def last_words(self) -> str:
        """The traceback it ended with, or the last lines it printed."""
        return self.errors.last_traceback() if self._fatal_traceback_at else self.errors.last_lines()

    @property
    def _fatal_traceback_at(self) -> float | None:
        """Time of the last traceback; one long before the end was of an exception that the program survived."""
        printed_at = self.errors.traceback_at
        return printed_at if printed_at is not None and self.ended_at - printed_at < FATAL_SECONDS else None

    def signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.exit_code is None:
            os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """Kill the process and everything it started that stayed in its group."""
        _kill_group(self.process.pid)


def _before_exec(launcher: int, cores: Sequence[int] | None) -> Callable[[], None]:
    def prepare() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class Guard:
    """A small process that outlives a killed launcher just long enough to kill the groups of its ranks.

    The parent-death signal of the kernel reaches the ranks alone, not what they started (data loader workers).
    """

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._writer)
            os.setsid()
            _wait_and_kill(reader)
        os.close(reader)

    def watch(self, rank: Rank) -> None:
        """Kill the group of this rank should the launcher die."""
        os.write(self._writer, b"%d\n" % rank.process.pid)

    def dismiss(self) -> None:
        """End the guard without killing anything."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writer)


def _wait_and_kill(reader: int) -> None:
    try:
        with open(reader) as lines:
            for group in [int(line) for line in lines]:  # the list is whole when the launcher's end has closed
                _kill_group(group)
    finally:
        os._exit(0)
