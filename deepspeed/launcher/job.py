"""A job as data: what runs, where, with which variables; nothing of it is ever part of a command line."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Export = tuple[str, str, str | None]
"""Name, value, and the one host it is for (None: all)."""


@dataclass(frozen=True)
class Elastic:
    """How the number of hosts may change: from `fewest` to `most`, each attempt with ranks that `valid` allows."""

    fewest: int
    most: int
    valid: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """What is to run.

    Args:
        slots: hosts with their device slots, in the order of the ranks.
        program: the command line of a rank, up to its arguments.
        arguments: of the script.
        folder: the folder the ranks start in.
        exports: declared variables.
        address: where rank 0 is met; empty asks the first host.
        port: of that place; 0 takes a free one.
        heartbeat: seconds of silence after which a host is lost.
        grace: seconds that ranks have after a signal of the user's.
        elastic: how the world may change; None ends the run with the first failure.
    """

    slots: dict[str, list[int]]
    program: list[str]
    arguments: list[str]
    folder: str
    exports: Sequence[Export] = ()
    address: str = ""
    port: int = 0
    heartbeat: float = 15.0
    grace: float = 30.0
    elastic: Elastic | None = None
    local_rank: bool = True
    venv_script: str = ""
    logs: str = ""
    prefix: bool = False
    bind_cores: bool = False
    bind_core_list: str = ""
    terminals: tuple[Any, Any] = (None, None)
    pid_of: int = 0  # of the launcher, whose number names the file of --save_pid; 0 for none
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    def message(self, host: str) -> dict[str, Any]:
        """What the agent of `host` is told."""
        names = ("id", "program", "arguments", "folder", "local_rank", "venv_script", "logs", "prefix")
        told = {name: getattr(self, name) for name in (*names, "bind_cores", "bind_core_list", "terminals", "pid_of")}
        exports = [export for export in self.exports if export[2] in (None, host)]
        return {**told, "exports": exports, "host": host}
