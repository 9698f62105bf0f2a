"""Processes of ranks, and a guard that kills them if their agent dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepspeed.launcher.rank_logs import Log, Size, Stream, open_channel

FATAL_SECONDS = 30.0
"""Maximum time between a final traceback and the end of its process."""

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True)
class RankSpec:
    """Start parameters of a rank.

    Args:
        number: global rank.
        command: command line.
        environment: all environment variables.
        folder: working directory; None: that of this process.
        cores: allowed CPU cores; None: those of this process.
        log_path: file for the output; None: no log.
        prefix: bytes before each shown line.
        terminals: terminal sizes of standard output and error; None: a pipe.
    """

    number: int
    command: Sequence[str]
    environment: dict[str, str]
    folder: str | None = None
    cores: Sequence[int] | None = None
    log_path: Path | None = None
    prefix: bytes = b""
    terminals: tuple[Size | None, Size | None] = (None, None)


class Rank:
    """One rank: its process, its output, and its exit code.

    Args:
        start: start parameters.
        emit: function (descriptor 1 or 2, bytes) that shows output.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, start: RankSpec, emit: Callable[[int, bytes], object]) -> None:
        self.number = start.number
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.peak_memory = 0
        self.log_path = start.log_path
        self._log: Log | None = None
        with contextlib.suppress(OSError):  # a disk that takes no log is no reason not to train
            self._log = Log(start.log_path) if start.log_path is not None else None
        self.streams: list[Stream] = []
        writers: list[int] = []
        try:
            for descriptor, size in zip((1, 2), start.terminals, strict=True):
                reader, writer = open_channel(size)
                writers.append(writer)
                self.streams.append(Stream(reader, partial(emit, descriptor), start.prefix, self._log))
            self.process = subprocess.Popen(
                start.command,
                env=start.environment,
                cwd=start.folder,
                stdout=writers[0],
                stderr=writers[1],
                # A session of its own: Ctrl-C reaches the rank once, through the launcher, and the group can be killed.
                start_new_session=True,
                preexec_fn=self._before_exec(os.getpid(), start.cores),
            )
        finally:
            for writer in writers:
                os.close(writer)
        self.errors = self.streams[1]

    def reap(self) -> bool:
        """Check without blocking whether the process has ended; if so, set exit code, end time and peak memory.

        Returns:
            True at the first call after the end of the process, else False.
        """
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
        """Read the remaining output, at most `READ_BYTES` per stream, and close the streams and the log."""
        for stream in self.streams:
            stream.close()
        if self._log is not None:
            self._log.close()

    @property
    def failed_at(self) -> float:
        """Time of the failure (`time.monotonic()`): that of the fatal traceback, else of the end of the process."""
        return self._fatal_traceback_at or self.ended_at

    def last_words(self) -> str:
        """Return the traceback that ended the process, or else the last lines on standard error."""
        return self.errors.last_traceback() if self._fatal_traceback_at else self.errors.last_lines()

    @property
    def _fatal_traceback_at(self) -> float | None:
        """Time of the last traceback; None without one, or if the process ran on for `FATAL_SECONDS` after it."""
        printed_at = self.errors.traceback_at
        return printed_at if printed_at is not None and self.ended_at - printed_at < FATAL_SECONDS else None

    def signal(self, number: int) -> None:
        """Send signal `number` to the process, if it still runs."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """Kill the process and its process group, such as data loader workers."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @staticmethod
    def _before_exec(launcher: int, cores: Sequence[int] | None) -> Callable[[], None]:
        def prepare() -> None:
            if _prctl is not None:
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the line above
                os._exit(1)
            if cores is not None:
                os.sched_setaffinity(0, cores)

        return prepare


def close_all_but(*descriptors: int) -> None:
    """Close the descriptors of this process (without /proc, those below 1024) except `descriptors`, 0, 1 and 2."""
    listed = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else range(1024)
    for descriptor in map(int, listed):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Guard:
    """Process that kills the process groups of the ranks when the agent dies, even by SIGKILL.

    The kernel's parent-death signal reaches only the ranks, not their child processes (data loader workers).
    """

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.setsid()
            close_all_but(reader)  # a copy of another descriptor here would hide that its owner has closed it
            self._kill_groups_at_end(reader)
        os.close(reader)

    def watch(self, rank: Rank) -> None:
        """Add the process group of a rank to those that are killed when this process dies."""
        os.write(self._writer, b"%d\n" % rank.process.pid)

    def dismiss(self) -> None:
        """End the guard; no process group is killed."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writer)

    @staticmethod
    def _kill_groups_at_end(reader: int) -> None:
        try:
            with open(reader) as lines:
                for group in [int(line) for line in lines]:  # the list is whole when the agent's end has closed
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, signal.SIGKILL)
        finally:
            os._exit(0)
