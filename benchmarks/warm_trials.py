"""Trials forked from one process that has imported everything: still processes of their own under the limits of
`deepspeed.planner.trials`, without the seconds in which each would import the same.

The server (multiprocessing's) has one thread, or a trial refuses to start: a fork takes only the thread that forks.
What a trial then does is what the launcher has a rank do, with the launcher's variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import Any

GRACE_S = 1.0  # for the other ranks once one has failed, and between SIGTERM and SIGKILL
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1


def warm(modules: list[str]) -> None:
    """Name what the server imports. Call before the first trial.

    Args:
        modules: their names.
    """
    multiprocessing.set_forkserver_preload(modules)


def cool() -> None:
    """End the server, and the process beside it that the library starts with it."""
    for keeper in (forkserver._forkserver, resource_tracker._resource_tracker):
        stopping: Any = keeper
        stopping._stop()


class Forked:
    """A trial's first process, with what `subprocess.Popen` offers of it.

    Args:
        process: started.
    """

    def __init__(self, process: ForkServerProcess) -> None:
        self._process, self.pid = process, int(process.pid or 0)

    @property
    def returncode(self) -> int | None:
        """As `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("trial", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


@dataclass(frozen=True)
class WarmCommand:
    """What a trial does in each rank, in place of `deepspeed.planner.trials.Command`.

    Args:
        ranks: of it.
        program: arguments of `deepspeed.planner.training_script`; `{config}` stands for the JSON of the trial.
    """

    ranks: int
    program: tuple[str, ...]

    def line(self, config: str) -> list[str]:
        """The same as a command line.

        Args:
            config: path of the JSON.
        """
        return ["deepspeed.planner.training_script", *(word.replace("{config}", config) for word in self.program)]

    def start(self, config: str, out: Any, err: Any) -> Forked:
        """Start a trial.

        Args:
            config: path of the JSON.
            out, err: files that take what its ranks say.
        """
        context = multiprocessing.get_context("forkserver")
        forkserver.ensure_running()
        server: Any = forkserver._forkserver
        told = (self.ranks, self.line(config)[1:], out.name, err.name, server._forkserver_pid)
        process = context.Process(target=_first, args=told, daemon=False)
        process.start()
        return Forked(process)


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with(parent: int) -> None:
    """From now on this process ends when its parent does: at once where it has, between the fork and here."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _first(ranks: int, program: list[str], out: str, err: str, server: int) -> None:
    """The trial's first process: starts its ranks, waits for them, ends all when one has failed."""
    os.setsid()
    _end_with(server)
    for number, path in ((1, out), (2, err)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the server has {threads} threads: a fork of it would miss all but one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gc.freeze()  # a collection in a rank would copy the pages of all that was imported
    started = {_rank(rank, ranks, port, program): rank for rank in range(ranks)}
    signal.signal(signal.SIGTERM, lambda *_: _end(started))
    failed, deadline = 0, float("inf")
    while started:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in started:
            rank, code = started.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, deadline = (code if code > 0 else 128 - code), time.monotonic() + GRACE_S
                print(f"rank {rank} failed first, with code {failed}", file=sys.stderr, flush=True)
        elif time.monotonic() > deadline:
            _end(started)
        else:
            time.sleep(0.01)
    os._exit(failed)


def _end(started: dict[int, int]) -> None:
    for pid in started:
        with contextlib.suppress(ProcessLookupError):  # SIGTERM came between its end and its being taken out
            os.kill(pid, signal.SIGKILL)


def _rank(rank: int, ranks: int, port: int, program: list[str]) -> int:
    """Fork a rank; gives its id."""
    from deepspeed.launcher.environment import NodePlacement
    from deepspeed.planner import training_script

    first, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # a rank has a session of its own, by which a trial's limits know it
        _end_with(first)
        _prctl(_PR_SET_NAME, f"RANK={rank}".encode())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ |= NodePlacement(0, 1, 0, ranks, list(range(ranks))).variables(rank)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        training_script.main(program)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def environment(ranks: int) -> dict[str, str]:
    """Variables that the server must have from its start, as the launcher gives them to ranks."""
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
