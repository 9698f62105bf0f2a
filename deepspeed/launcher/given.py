"""Secrets that a job was given, kept beside its logs in a form that finds them there and does not tell them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

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
