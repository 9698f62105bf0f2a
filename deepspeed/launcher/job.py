"""Description of a job (program, hosts, variables), and digests of its secrets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Export = tuple[str, str, str | None]
"""Name, value, and host of a variable (None: all hosts)."""


@dataclass(frozen=True)
class Elastic:
    """Limits of an elastic job.

    Args:
        fewest: minimum number of hosts.
        most: maximum number of hosts.
        valid: allowed numbers of ranks; empty: any number.
    """

    fewest: int
    most: int
    valid: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """Job: program, hosts and options.

    Args:
        slots: hosts with their device slots, in the order of the ranks.
        program: command line of a rank, without the script's arguments.
        arguments: arguments of the script.
        folder: working directory.
        exports: variables for the ranks.
        address: rendezvous address of rank 0; "": that of the first host.
        port: rendezvous port; 0: any free port.
        heartbeat: seconds of silence after which a host is lost.
        grace: seconds between a stop signal and SIGKILL.
        elastic: limits of an elastic job; None: the first failure ends the job.
        local_rank: pass `--local_rank=N` to the script.
        venv_script: shell script that is sourced before each rank; "": none.
        logs: folder for rank logs; "": the temporary folder.
        prefix: show the rank before each line of output.
        bind_cores: divide the cores in `bind_core_list` ("": all) among the ranks of a host.
        terminals: terminal sizes of standard output and error; None: no terminal.
        pid_of: process id of the launcher, in the name of the file of --save_pid; 0: no file.
        id: identifier of the job.
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
    pid_of: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    def message(self, host: str) -> dict[str, Any]:
        """Return the fields that the agent of `host` needs, as JSON values."""
        names = ("id", "program", "arguments", "folder", "local_rank", "venv_script", "logs", "prefix")
        fields = {name: getattr(self, name) for name in (*names, "bind_cores", "bind_core_list", "terminals", "pid_of")}
        exports = [export for export in self.exports if export[2] in (None, host)]
        return {**fields, "exports": exports, "host": host}


WORDS = r"pass(?:word|wd|phrase)?|pwd|secret|token|credential|api[_-]?key|(?:access|private|account|auth)[_-]?key|auth"
_NAME = re.compile(rf"(?:^|[_-])(?:{WORDS}|key)s?(?:$|[_-])", re.IGNORECASE)
_STARTS = re.compile(r"(?<!\w)\w|\W")  # a secret begins at the start of a word, or with another character
_PREFIX, _FEWEST = "given-", 6  # minimum characters: shorter secrets could be found by trial


class SecretDigest(NamedTuple):
    """Digest by which a secret can be found in a text: its length in characters, a salt, and the salted hash (hex)."""

    length: int
    salt: str
    digest: str


def names_a_secret(name: str) -> bool:
    """Whether a variable name, such as API_KEY, indicates a secret."""
    return bool(_NAME.search(name))


def save_digests(folder: Path, variables: Mapping[str, str]) -> None:
    """Write digests of secret variables (6 characters or more) to a new file in a log folder; ignore file errors."""
    values = {value for name, value in variables.items() if names_a_secret(name) and len(value) >= _FEWEST}
    if not values:
        return
    salted = [(os.urandom(16).hex(), value) for value in sorted(values)]
    digests = [SecretDigest(len(value), salt, _digest(salt, value)) for salt, value in salted]
    with contextlib.suppress(OSError):  # a full disk is no reason not to train
        descriptor, _ = tempfile.mkstemp(".json", _PREFIX, folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump(digests, file)


def load_digests(folder: Path) -> list[SecretDigest]:
    """Return the digests that `save_digests` wrote to a folder or its subfolders, of the longest secrets first."""
    digests: list[SecretDigest] = []
    for path in sorted(folder.rglob(f"{_PREFIX}*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            digests += [SecretDigest(*entry) for entry in json.loads(path.read_text())]
    return sorted(digests, reverse=True)


def hide(text: str, digests: Iterable[SecretDigest], shown: str) -> str:
    """Return a text in which the secrets of these digests are replaced by `shown`."""
    for length, salt, digest in digests:
        starts = (match.start() for match in _STARTS.finditer(text))
        values = {part for start in starts if len(part := text[start : start + length]) == length}
        for value in values:
            if _digest(salt, value) == digest:
                text = text.replace(value, shown)
    return text


def _digest(salt: str, value: str) -> str:
    return hashlib.blake2b(value.encode(errors="replace"), key=salt.encode(), digest_size=16).hexdigest()
