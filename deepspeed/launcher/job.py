"""Description of a job: program, hosts, variables, and digests of its secrets."""

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
    """Range of the number of hosts: from `fewest` to `most`, with the rank counts in `valid`."""

    fewest: int
    most: int
    valid: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """A job.

    Args:
        slots: hosts with their device slots, in the order of the ranks.
        program: command line of a rank, up to its arguments.
        address: rendezvous address of rank 0; empty: the first host's.
        port: port of that address; 0: any free port.
        heartbeat: seconds of silence after which a host is lost.
        grace: seconds that ranks have after a user's signal.
        elastic: range of the world size; None: the first failure ends the run.
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
        """Return the part of the job that the agent of `host` needs."""
        names = ("id", "program", "arguments", "folder", "local_rank", "venv_script", "logs", "prefix")
        fields = {name: getattr(self, name) for name in (*names, "bind_cores", "bind_core_list", "terminals", "pid_of")}
        exports = [export for export in self.exports if export[2] in (None, host)]
        return {**fields, "exports": exports, "host": host}


WORDS = r"pass(?:word|wd|phrase)?|pwd|secret|token|credential|api[_-]?key|(?:access|private|account|auth)[_-]?key|auth"
_NAME = re.compile(rf"(?:^|[_-])(?:{WORDS}|key)s?(?:$|[_-])", re.IGNORECASE)
_STARTS = re.compile(r"(?<!\w)\w|\W")  # a secret begins with a word, or with no letter at all
_PREFIX, _FEWEST = "given-", 6  # characters: shorter ones could be tried out


class SecretDigest(NamedTuple):
    """A secret's length in characters, and the hexadecimal digest of salt and value."""

    length: int
    salt: str
    digest: str


def names_a_secret(name: str) -> bool:
    """Return whether a variable name indicates a secret."""
    return bool(_NAME.search(name))


def save_digests(folder: Path, variables: Mapping[str, str]) -> None:
    """Store the digests of the secret variables in a log folder, readable only by its owner."""
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
    """Load the digests of `save_digests` in this folder or its subfolders; longest paths first."""
    digests: list[SecretDigest] = []
    for path in sorted(folder.rglob(f"{_PREFIX}*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            digests += [SecretDigest(*entry) for entry in json.loads(path.read_text())]
    return sorted(digests, reverse=True)


def hide(text: str, digests: Iterable[SecretDigest], shown: str) -> str:
    """Replace the secrets of these digests in a text."""
    for length, salt, digest in digests:
        starts = (match.start() for match in _STARTS.finditer(text))
        values = {part for start in starts if len(part := text[start : start + length]) == length}
        for value in values:
            if _digest(salt, value) == digest:
                text = text.replace(value, shown)
    return text


def _digest(salt: str, value: str) -> str:
    return hashlib.blake2b(value.encode(errors="replace"), key=salt.encode(), digest_size=16).hexdigest()
