"""Monitor for CSV files, one for each event name."""

from __future__ import annotations

import csv
import io
from typing import Any

from deepspeed.monitor.base import Event, Monitor, folder_of


class csvMonitor(Monitor):
    """Monitor for CSV: appends `step,value` rows to one file per event name; a restarted run continues the files.

    In file names, `_` replaces slashes and spaces.

    Args:
        csv_config: the `csv_monitor` block; the files are in `folder_of` it.
    """

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.log_dir = folder_of(csv_config)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, io.TextIOWrapper] = {}

    def _file(self, name: str) -> io.TextIOWrapper:
        if name not in self._files:
            path = self.log_dir / (name.replace("/", "_").replace(" ", "_") + ".csv")
            self._files[name] = path.open("a", newline="")
            if self._files[name].tell() == 0:
                csv.writer(self._files[name]).writerow(["step", name.rpartition("/")[2]])
        return self._files[name]

    def write(self, events: list[Event]) -> None:
        """Append the events, and flush their files."""
        for event in events:
            csv.writer(self._file(event.name)).writerow([event.step, event.value])
        for name in {event.name for event in events}:
            self._files[name].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
