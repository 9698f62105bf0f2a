"""The pytest side of the persistent workers: start them, send them functions, kill them when they hang."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeAlias

from tests.harness.fork_server import Forked, ForkServer, servers_of

REPOSITORY = Path(__file__).resolve().parents[2]
GRACE = 2.0  # seconds the other ranks get to answer once one rank has failed
# What most tests on ranks import is there when they start: an engine's modules alone take 1.6 s of each rank.
ENGINE_IMPORTS = ("transformers.models.llama.modeling_llama", "deepspeed.engine.initialize")
WORKER_IMPORTS = ("tests.harness.worker", *ENGINE_IMPORTS)
EMULATED_IMPORTS = ("tests.emulated.worker", *ENGINE_IMPORTS)
LOG_TAIL = 4000  # characters of a rank's log shown with a failure


# On a machine that is busy with other work, answers take longer: TEST_PATIENCE=5 waits five times as long. Beside
# another worker of pytest-xdist the machine is busy.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "2" if "PYTEST_XDIST_WORKER" in os.environ else "1"))


Answer: TypeAlias = tuple[bool, Any, bool]  # whether it returned, its result or traceback, whether the group has ended


class WorkerError(AssertionError):
    """A function raised on one or more ranks; the message holds each traceback."""


class WorkerTimeout(AssertionError):
    """Some ranks did not answer in time; the message holds where each of them stood."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class WorkerPool:
    """`size` processes that hold one gloo group and run functions on request.

    A pool that failed in any way is killed and starts afresh at its next `run`: a rank that raised in the middle
    of a collective leaves its peers in a state that no later test may see. The same holds for a test that caught an
    error which the watchdog had reported to all ranks: nothing watches the group any more.
    """

    def __init__(self, size: int, worker: str = "tests.harness.worker", imported: Sequence[str] = ()) -> None:
        """
        Args:
            size: number of ranks.
            worker: the module that serves.
            imported: modules that the ranks have when they start, since a server forks them; without any, each starts
                in an interpreter of its own, with the variables that are there then.
        """
        self.size = size
        self._worker = worker
        self._imported = imported
        self._processes: list[subprocess.Popen[bytes] | Forked] = []
        self._pipes: list[Connection] = []
        self._logs: list[Path] = []
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")

    @property
    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [process.pid for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
        """Call `fn(*args)` on every rank.

        Args:
            fn: a module-level function of an importable module.
            args: picklable arguments, the same for every rank.
            timeout: seconds until all ranks must have answered, on a machine with nothing else to do.

        Returns:
            The results in rank order.

        Raises:
            WorkerError: a rank raised, or died.
            WorkerTimeout: a rank did not answer.
        """
        __tracebackhide__ = True
        if not self._processes:
            self._start()
        request = pickle.dumps((fn, args))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(request)
            answers = self._collect(time.monotonic() + timeout * PATIENCE)
        except BaseException:
            self.kill()
            raise
        failed = {rank: text for rank, (ok, text, _) in answers.items() if not ok}
        if failed or len(answers) < self.size:
            message = self._describe(fn, failed, answers, timeout)
            self.kill()
            raise (WorkerError if failed else WorkerTimeout)(message)
        if any(ended for _, _, ended in answers.values()):
            self.kill()
        return [answers[rank][1] for rank in range(self.size)]

    def kill(self) -> None:
        """End the workers; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._logs = [], [], []

    def close(self) -> None:
        """End the workers for good."""
        self.kill()
        self._folder.cleanup()

    def _start(self) -> None:
        port = free_port()
        servers = servers_of(self.size, self._imported) if self._imported else [None] * self.size
        for rank, server in enumerate(servers):
            ours, theirs = Pipe()
            log = Path(self._folder.name) / f"{port}-rank{rank}.log"
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
            }
            with log.open("wb") as sink:
                self._processes.append(self._started(server, theirs.fileno(), env, sink.fileno()))
            theirs.close()
            self._pipes.append(ours)
            self._logs.append(log)

    def _started(
        self, server: ForkServer | None, pipe: int, env: Mapping[str, str], sink: int
    ) -> subprocess.Popen[bytes] | Forked:
        if server is not None:
            return server.start(f"from {self._worker} import main\nmain()", env, sink, sink, [pipe])
        return subprocess.Popen(
            [sys.executable, "-m", self._worker, str(pipe)],
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            pass_fds=[pipe],
        )

    def _collect(self, deadline: float) -> dict[int, Answer]:
        """Answers by rank until all are in, the deadline passes, or the grace after a first failure is over."""
        answers: dict[int, Answer] = {}
        while len(answers) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _receive(self, rank: int) -> Answer:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            code = self._processes[rank].wait()
            return False, f"the process ended with code {code}\n{self._tail(rank)}", True

    def _describe(
        self, fn: Callable[..., Any], failed: dict[int, str], answers: dict[int, Answer], timeout: float
    ) -> str:
        silent = [rank for rank in range(self.size) if rank not in answers]
        for rank in silent:
            self._processes[rank].send_signal(signal.SIGUSR1)  # faulthandler writes the stacks into the log
        if silent:
            time.sleep(0.3)
        # Logs are cut in the middle: what was raised stands first, before where.
        raised = [f"rank {rank}: {text.rstrip().splitlines()[-1]}" for rank, text in sorted(failed.items())]
        parts = ["; ".join([f"{fn.__module__}.{fn.__qualname__} on {self.size} ranks", *raised])]
        parts += [f"--- rank {rank} failed:\n{text}" for rank, text in sorted(failed.items())]
        parts += [f"--- rank {rank} gave no answer (limit {timeout:g} s):\n{self._tail(rank)}" for rank in silent]
        return "\n".join(parts)

    def _tail(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-LOG_TAIL:]
