"""Log line for an integration with a client release that is newer than the tested ones."""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata

from deepspeed.foundation.log import log_once

NAME = "deepspeed"
_BOUND = re.compile(r"([\w.-]+)[^;]*<=\s*([\w.]+)")


def say_untested() -> None:
    """Log one line for each imported client package that is newer than the newest tested release."""
    for name, newest in newest_tested().items():
        here = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(here, str) and _numbers(here) > _numbers(newest):
            log_once(
                f"{name} {here} is newer than the newest release that was tested, {newest}: if something is refused or "
                f"slower than before, compare with `pip install '{name}<={newest}'`"
            )


@functools.cache
def newest_tested() -> dict[str, str]:
    """Return the newest tested release of each package in the extras that has an upper bound, by module name."""
    try:
        required = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # a tree on Python's path
        return {}
    bounds = [match.groups() for line in required if (match := _BOUND.match(line))]
    return {name.replace("-", "_"): newest for name, newest in bounds}


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
