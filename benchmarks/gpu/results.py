"""The file of rows: lines of JSON that are only appended, so that a kill costs the row in flight at most."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

BEGUN, OK, WRONG, MISSING, FAILED, ENDED = "begun", "ok", "wrong", "missing", "failed", "ended"
TRIES = 2  # ends of the process in one row after which the row is left alone
NAME = "results.jsonl"

Facts = dict[str, Any]
Key = tuple[str, str]  # part, row


class Results:
    """Rows of one card.

    Args:
        folder: folder of the file, made at the first line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME

    def lines(self) -> list[Facts]:
        """Return all lines; a torn one, where a write was cut off, is left out."""
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def rows(self) -> dict[Key, Facts]:
        """Return the newest finished line of each row. A row that ended its process counts as finished
        after `TRIES` times, or at once if it was `final`: not over in time."""
        finished: dict[Key, Facts] = {}
        ends: dict[Key, int] = {}
        for line in self.lines():
            key = line["part"], line["key"]
            if line["state"] == ENDED:
                ends[key] = ends.get(key, 0) + 1
            if line["state"] not in (BEGUN, ENDED) or ends.get(key, 0) >= TRIES or line.get("final"):
                finished[key] = line
        return finished

    def open_row(self, part: str) -> Facts | None:
        """Return the line with which the part's last row was begun if it has no end, or None."""
        own = [line for line in self.lines() if line["part"] == part]
        return own[-1] if own and own[-1]["state"] == BEGUN else None

    def append(self, part: str, key: str, state: str, **facts: Any) -> None:
        """Append one line, and wait until the disk has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"part": part, "key": key, "state": state, "when": round(time.time(), 1), **facts})
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # an earlier write was cut off
                    line = "\n" + line
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
