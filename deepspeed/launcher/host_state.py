"""The state of each host, and its failure."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field

from deepspeed.launcher.channel import Channel
from deepspeed.launcher.environment import NodePlacement

TAIL_BYTES = 8192


@dataclass(eq=False)
class StarterProcess:
    """A process that starts agents: ssh for one host, mpirun for all.

    Args:
        popen: the process; None for an agent that was forked.
        pid: its id.
        peer: the host it is for; None means all.
    """

    popen: subprocess.Popen[bytes] | None
    pid: int
    peer: HostState | None
    tail: bytes = b""

    def read(self) -> bool:
        """Take what it says on standard error; False at its end."""
        if self.popen is None or self.popen.stderr is None:
            return False
        try:
            data = os.read(self.popen.stderr.fileno(), TAIL_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        return bool(data)

    def says(self) -> str:
        """Its last words, in one line."""
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines()]
        return "; ".join(line for line in lines[-6:] if line)

    def code(self) -> int | None:
        """Its exit code once it has ended."""
        return 0 if self.popen is None else self.popen.poll()


@dataclass(eq=False)
class HostState:
    """One host.

    Args:
        name: as the user wrote it.
        slots: its device slots.
    """

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
        """Whether it can no longer be reached."""
        return bool(self.problem)

    def forget(self) -> None:
        """As if it had never been there: it is tried again."""
        self.channel = self.process = None
        self.ready = False
        self.problem = ""
        self.pids.clear()
        self.left.clear()
        self.since = time.monotonic()

    def send(self, kind: str, /, **fields: object) -> None:
        """Send a message if it is there."""
        if self.channel is not None and self.channel.open:
            self.channel.send(kind, **fields)

    def ranks(self) -> str:
        """Its ranks in words."""
        if self.node is None or not self.slots:
            return "no rank"
        first, count = self.node.first_rank, len(self.node.slots)
        return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"


@dataclass(frozen=True)
class Failure:
    """A rank that failed or a host that was lost.

    Args:
        at: when, in seconds of this machine's clock.
        code: exit code; negative for a signal.
        text: what the report says.
        secondary: it only lost another rank.
        rank: which; None for a host.
    """

    at: float
    code: int
    text: str
    secondary: bool = False
    rank: int | None = None

    @property
    def shell_code(self) -> int:
        """As a shell gives it."""
        return 128 - self.code if self.code < 0 else self.code
