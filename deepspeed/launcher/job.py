"""A job as data: program, hosts, variables, and digests of its secrets."""

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


WORDS = r"pass(?:word|wd|phrase)?|pwd|secret|token|credential|api[_-]?key|(?:access|private|account|auth)[_-]?key|auth"
_NAME = re.compile(rf"(?:^|[_-])(?:{WORDS}|key)s?(?:$|[_-])", re.IGNORECASE)
_STARTS = re.compile(r"(?<!\w)\w|\W")  # a secret begins with a word, or with no letter at all
_PREFIX, _FEWEST = "given-", 6  # characters: shorter ones could be tried out


class Given(NamedTuple):
    """A secret: its length in characters, and the digest of salt and value, in hexadecimal."""

    length: int
    salt: str
    digest: str


def names_a_secret(name: str) -> bool:
    """Whether a variable of that name holds a secret."""
    return bool(_NAME.search(name))


def keep(folder: Path, variables: Mapping[str, str]) -> None:
    """Leave the digests of the secrets among some variables in a folder of logs, for its owner alone.

    Args:
        folder: of an attempt's logs.
        variables: by name.
    """
    found = {value for name, value in variables.items() if names_a_secret(name) and len(value) >= _FEWEST}
    if not found:
        return
    made: list[Given] = []
    for value in sorted(found):
        salt = os.urandom(16).hex()
        made.append(Given(len(value), salt, _digest(salt, value)))
    with contextlib.suppress(OSError):  # a full disk is no reason not to train
        descriptor, _ = tempfile.mkstemp(".json", _PREFIX, folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump(made, file)


def kept(folder: Path) -> list[Given]:
    """What `keep` has left there, or below; longest first."""
    found: list[Given] = []
    for path in sorted(folder.rglob(f"{_PREFIX}*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found += [Given(*one) for one in json.loads(path.read_text())]
    return sorted(found, reverse=True)


def hide(text: str, given: Iterable[Given], shown: str) -> str:
    """The text with what these secrets were replaced by other words."""
    for length, salt, digest in given:
        starts = (match.start() for match in _STARTS.finditer(text))
        values = {part for at in starts if len(part := text[at : at + length]) == length}
        for value in values:
            if _digest(salt, value) == digest:
                text = text.replace(value, shown)
    return text


def _digest(salt: str, value: str) -> str:
    return hashlib.blake2b(value.encode(errors="replace"), key=salt.encode(), digest_size=16).hexdigest()
