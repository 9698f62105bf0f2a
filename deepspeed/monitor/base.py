"""What every monitor is: it takes events, and is closed. Nothing here, or in a monitor's module, imports torch."""

from __future__ import annotations

import abc
import importlib.util
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from deepspeed.errors import NotAvailableError


class Event(NamedTuple):
    """One number of a run.

    Attributes:
        name: slashes separate its parts.
        value: the number; it may be infinite or NaN.
        step: x axis; the engine's events count samples over all ranks.
        time: seconds since 1970 when it was queued.
    """

    name: str
    value: float
    step: int
    time: float


class Monitor(abc.ABC):
    """Writes events to one place, in this process and at once; an engine's are written by `writer`, aside.

    Args:
        config: the block of the configuration, or anything with its keys as attributes.

    Raises:
        NotAvailableError: the package it writes through is not installed.
    """

    module: ClassVar[str] = ""  # of the package that it writes through
    extra: ClassVar[str] = ""  # of ours that installs it

    def __init__(self, config: Any) -> None:
        self.monitor_config, self.enabled = config, bool(config.enabled)
        self.require()

    @classmethod
    def require(cls) -> None:
        """Raise unless the package is installed, without importing it."""
        if cls.module and importlib.util.find_spec(cls.module) is None:
            raise NotAvailableError(f"{cls.__name__} writes through {cls.module}: pip install 'deepspeed[{cls.extra}]'")

    def write_events(self, event_list: Iterable[tuple[Any, ...]], flush: bool = True) -> None:
        """Write events.

        Args:
            event_list: (name, value, step) each, or `Event`s.
            flush: accepted for old scripts; what was written is always flushed.
        """
        now = time.time()
        self.write([Event(str(e[0]), float(e[1]), int(e[2]), e[3] if len(e) > 3 else now) for e in event_list])

    @abc.abstractmethod
    def write(self, events: list[Event]) -> None:
        """Write, and let the operating system, or the package, have it all."""

    def close(self) -> None:  # noqa: B027  # files that are flushed may stay open
        """Nothing more will come."""


def folder_of(config: Any) -> Path:
    """The folder of a run: `output_path`/`job_name`, below the working directory where no path is given."""
    return Path(config.output_path or ".").absolute() / config.job_name
