"""Which cores servers have in a benchmark, and which their clients: all sides get the same."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cores:
    """Numbers of the machine's cores.

    Attributes:
        servers: of each server with all of its processes, and of an engine in this process.
        clients: of the program that asks; all cores if the servers have all of them.
    """

    servers: tuple[int, ...]
    clients: tuple[int, ...]

    @classmethod
    def first(cls, count: int, usable: Collection[int]) -> Cores:
        """The first `count` of the usable cores are the servers', the others the clients'.

        Raises:
            SystemExit: there are not so many.
        """
        ordered = tuple(sorted(usable))
        if not 1 <= count <= len(ordered):
            raise SystemExit(f"--cores {count}: this process may use {len(ordered)} cores; give 1 to {len(ordered)}")
        return cls(ordered[:count], ordered[count:] or ordered)

    @property
    def threads(self) -> int:
        """Threads of each server: one a core."""
        return len(self.servers)

    def pin(self) -> None:
        """This process and those that it starts run on the servers' cores from now on."""
        for thread in Path("/proc/self/task").iterdir():  # libraries may have started some, which do not follow
            os.sched_setaffinity(int(thread.name), self.servers)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Within the block the calling thread is a client."""
        os.sched_setaffinity(0, self.clients)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self.servers)

    def __str__(self) -> str:
        servers, clients = (", ".join(map(str, cores)) for cores in (self.servers, self.clients))
        return f"servers and the engine in process on core {servers} with {self.threads} threads, clients on {clients}"
