"""Logger of the package, and helpers that log a message once, or only on some ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable

from deepspeed.errors import ArgumentError


class _LateStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler that looks up `sys.stderr` for each line, so that later redirections take effect."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[override]  # noqa: ANN201
        return sys.stderr


def _make_logger() -> logging.Logger:
    log = logging.getLogger("DeepSpeed")
    if not log.handlers:
        handler = _LateStderr()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed] %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(logging.INFO)
    return log


logger = _make_logger()
_said: set[tuple[object, str]] = set()


def current_rank() -> int:
    """Return this process's rank from the environment variable RANK (0 if it is not set)."""
    return int(os.environ.get("RANK") or 0)


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks.

    Args:
        message: text of the log line.
        ranks: ranks that log; None or [-1]: all ranks.
        level: level of the standard library's `logging`.
    """
    wanted = None if ranks is None else set(ranks)
    if wanted is None or -1 in wanted or current_rank() in wanted:
        logger.log(level, "[rank %d] %s", current_rank(), message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the package's logger, or of another one.

    Args:
        log_level_str: "debug", "info", "warning", "error" or "critical", in any case.
        custom_logger: another logger; None: the package's.

    Raises:
        ArgumentError: there is no level of that name.
    """
    levels = ("debug", "info", "warning", "error", "critical")
    if log_level_str.lower() not in levels:
        raise ArgumentError(f"log level {log_level_str!r} is none of {', '.join(levels)}")
    (custom_logger or logger).setLevel(log_level_str.upper())


def describe_error(error: Exception, most: int = 120) -> str:
    """Return an error's class and the first line of its message, at most `most` characters of it."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:most]}"


def log_rank0(message: str, level: int = logging.INFO) -> None:
    """Log `message` on rank 0 only; `level` is one of `logging`."""
    if current_rank() == 0:
        logger.log(level, message)


def log_once(message: str, key: object = None, level: int = logging.INFO) -> None:
    """Log `message` on rank 0, once per process for each `key` (default: once per text)."""
    mark = (key, "" if key is not None else message)
    if mark not in _said:
        _said.add(mark)
        log_rank0(message, level)


def warn_once(message: str, key: object = None) -> None:
    """Log a warning on rank 0, once per process for each `key`; see `log_once`."""
    log_once(message, key, logging.WARNING)
