"""Each rank's last step in a small mapped file that other programs can read.

[Note: half a page] A reader may come in the middle of a write. The length is zero meanwhile, and what does not parse is
read again.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_BYTES = 4096
_LENGTH = struct.Struct("=I")
FOLDER = "ranks"


class LivePage:
    """One rank's page below the folder of a run.

    Args:
        folder: of the run.
        rank: of this process.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / FOLDER / f"{rank}.page"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb+") as file:
            file.truncate(_BYTES)
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._process = os.getpid()

    def write(self, facts: dict[str, Any]) -> None:
        """Replace what is there.

        Args:
            facts: values that JSON has, less than a page of them.
        """
        if os.getpid() != self._process:  # a forked loader is no rank
            return
        data = json.dumps({"time": time.time(), "process": self._process, **facts}).encode()
        if len(data) <= _BYTES - _LENGTH.size:
            _LENGTH.pack_into(self._memory, 0, 0)
            self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
            _LENGTH.pack_into(self._memory, 0, len(data))

    def close(self) -> None:
        """Let the memory go; the file stays."""
        self._memory.close()


def read_pages(folder: Path) -> dict[int, dict[str, Any]]:
    """What the ranks of a run wrote last, by rank."""
    found: dict[int, dict[str, Any]] = {}
    for path in (folder / FOLDER).glob("*.page"):
        with suppress(OSError, ValueError):
            found[int(path.stem)] = _read(path)
    return dict(sorted(found.items()))


def _read(path: Path, tries: int = 5) -> dict[str, Any]:
    """A page; ValueError when it never was whole."""
    for _ in range(tries):
        data = path.read_bytes()
        with suppress(ValueError, struct.error):  # the file may have been made a moment ago
            (length,) = _LENGTH.unpack_from(data)
            page = json.loads(data[_LENGTH.size : _LENGTH.size + length]) if length else None
            if isinstance(page, dict) and {"time", "process"} <= page.keys():
                return page
        time.sleep(0.002)
    raise ValueError(f"{path} is empty")
