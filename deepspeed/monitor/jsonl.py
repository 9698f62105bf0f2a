"""Events as lines of JSON, in one file that many programs read."""

from __future__ import annotations

import json
import math
from typing import Any

from deepspeed.monitor.base import Event, Monitor, folder_of


class JsonlMonitor(Monitor):
    """Appends a line with name, value, step and time for each event; numbers that JSON has not are strings."""

    def __init__(self, jsonl_config: Any) -> None:
        super().__init__(jsonl_config)
        self.path = folder_of(jsonl_config) / "events.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def write(self, events: list[Event]) -> None:
        """One write for all of them, so that a reader never sees half a line."""
        rows = (e._asdict() | {"value": e.value if math.isfinite(e.value) else str(e.value)} for e in events)
        self._file.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
