"""State of a host and of the processes that start agents, and description of a failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.launcher.channel import Channel
from deepspeed.launcher.environment import NodePlacement

TAIL_BYTES = 8192


@dataclass(eq=False)
class StarterProcess:
    """Process that starts agents.

    Args:
        popen: the process, such as ssh or mpirun; None for a forked agent.
        pid: process id.
        peer: host of the agent (ssh, fork); None if the process starts the agents of all hosts.
        tail: end of its output, in bytes.
    """

    popen: subprocess.Popen[bytes] | None
    pid: int
    peer: HostState | None
    tail: bytes = b""

    def read(self, descriptor: int) -> bool:
        """Read from `descriptor`, one of the process's outputs, without blocking; return False at its end."""
        try:
            data = os.read(descriptor, TAIL_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        return bool(data)

    def last_lines(self) -> str:
        """Return the last lines of the output, joined by semicolons."""
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines()]
        return "; ".join(line for line in lines[-6:] if line)

    def code(self) -> int | None:
        """Return the exit code, or None while the process runs; 0 for a forked agent."""
        return 0 if self.popen is None else self.popen.poll()

    def kill(self) -> None:
        """Kill the process and its local descendants, such as pdsh's ssh processes, but no agents, forked or remote."""
        if self.popen is None:
            return
        helpers = self._helpers(self.pid if self.peer is not None else os.getpid())  # of one for all, orphans too
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=0.5)
        for pid in helpers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    @classmethod
    def _helpers(cls, pid: int) -> list[int]:
        """Return the ids of all descendants of a process, except agents and their descendants."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                    int(stat.parent.name)
                )
        own, helpers, waiting = cls._program(os.getpid()), list[int](), [pid]
        while waiting:
            for child in children.get(waiting.pop(), ()):
                program = cls._program(child)
                if program and program != own:
                    helpers.append(child)
                    waiting.append(child)
        return helpers

    @staticmethod
    def _program(pid: int) -> str:
        """Return the path of a process's executable; "" if the process has ended."""
        try:
            return os.readlink(f"/proc/{pid}/exe")
        except OSError:
            return ""


@dataclass(eq=False)
class HostState:
    name: str
    slots: list[int]
    channel: Channel | None = None
    process: StarterProcess | None = None
    local: bool = False
    ready: bool = False
    started: bool = False
    node: NodePlacement | None = None
    left: set[int] = field(default_factory=set[int])  # ranks that have not ended
    pids: list[int] = field(default_factory=list[int])
    problem: str = ""
    address: str = ""
    host: str = ""
    since: float = field(default_factory=time.monotonic)

    @property
    def lost(self) -> bool:
        return bool(self.problem)

    def reset(self) -> None:
        """Reset the state of a lost host, before its agent is started again."""
        self.channel = self.process = None
        self.ready = False
        self.problem = ""
        self.pids.clear()
        self.left.clear()
        self.since = time.monotonic()

    def send(self, kind: str, /, **fields: object) -> None:
        """Send a message to the host's agent, if it is connected; arguments as in `Channel.send`."""
        if self.channel is not None and self.channel.open:
            self.channel.send(kind, **fields)

    def ranks(self) -> str:
        """Return a text with the host's ranks, for messages."""
        if self.node is None or not self.slots:
            return "no rank"
        first, count = self.node.first_rank, len(self.node.slots)
        return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, or loss of a host.

    Args:
        time: time of the failure, in seconds of `time.monotonic()`.
        code: exit code; -N: ended by signal N.
        text: report.
        secondary: whether the rank failed only because another rank was lost.
        rank: global rank; None for the loss of a host.
    """

    time: float
    code: int
    text: str
    secondary: bool = False
    rank: int | None = None

    @property
    def shell_code(self) -> int:
        """Exit code in a shell's form: 128 + number for a signal."""
        return 128 - self.code if self.code < 0 else self.code
