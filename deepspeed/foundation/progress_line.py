"""Lines that show how far long work is: over one another on a terminal, one below the other elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

VARIABLE = "DEEPSPEED_PROGRESS"
"""Variable that requests progress lines; `deepspeed --progress` sets 1."""

LIVE_S, PLAIN_S = 0.25, 10.0  # between two lines, with a terminal and without


def requested() -> bool:
    """Return whether the variable `DEEPSPEED_PROGRESS` requests progress lines."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def is_live(stream: TextIO | None = None) -> bool:
    """Return whether a stream (None: the current standard error) is a terminal."""
    return (stream or sys.stderr).isatty()


def write_line(text: str, stream: TextIO | None = None, last: bool = False) -> None:
    """Write a line; on a terminal, the next output writes over it unless it is the last one.

    Args:
        text: cut to the width of a terminal.
        stream: None: the current standard error.
        last: no further line follows.
    """
    target: TextIO = stream or sys.stderr
    if is_live(target):
        width = shutil.get_terminal_size().columns
        # The cursor goes back to where the line began, so that other output writes over it.
        text = f"\r{text[: width - 1]}\x1b[K" + ("\n" if last else "\r")
    else:
        text += "\n"
    target.write(text)
    target.flush()


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, with hours from one hour on."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class CountLine:
    """Line for work of a known number of items, written by the caller's own loop.

    Nothing is written without a terminal, unless `DEEPSPEED_PROGRESS` requests it, nor for work that ends at once.

    Args:
        label: what is done, and the unit, such as "analysis" and "samples".
        unit: name of the items.
        total: number of items.
        stream: target of the lines; None: the current standard error.
        every: seconds between two lines, and before the first; None: 0.25 on a terminal, 10 otherwise.
    """

    def __init__(
        self, label: str, unit: str, total: int, stream: TextIO | None = None, every: float | None = None
    ) -> None:
        self._label, self._unit, self._total, self._stream = label, unit, total, stream
        self._shown = is_live(stream) or requested()
        self._every = every if every is not None else LIVE_S if is_live(stream) else PLAIN_S
        self._began = self._written = time.monotonic()
        self._any = False

    def update(self, done: int) -> None:
        """Write a line if it is time for one.

        Args:
            done: number of items so far.
        """
        if self._shown and time.monotonic() - self._written >= self._every:
            self._written, self._any = time.monotonic(), True
            write_line(self.text(done), self._stream)

    def text(self, done: int) -> str:
        """Return the text of a line: the label, the items so far, their rate and the remaining time."""
        rate = done / max(time.monotonic() - self._began, 1e-9)
        left = f" · {clock((self._total - done) / rate)} left" if 0 < done < self._total else ""
        return f"{self._label}: {done:,} of {self._total:,} {self._unit} · {rate:,.4g} {self._unit}/s{left}"

    def close(self, done: int) -> None:
        """Write the last line, if there was one before."""
        if self._any:
            write_line(self.text(done), self._stream, last=True)
            self._any = False
