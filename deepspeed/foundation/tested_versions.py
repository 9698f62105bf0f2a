"""Log line for client packages with a release that is newer than the newest tested one."""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata

from deepspeed.foundation.log import log_once

NAME = "deepspeed"
_BOUND = re.compile(r"([\w.-]+)[^;]*<=\s*([\w.]+)")


def say_untested() -> None:
    """Log one line for each imported client package with a release newer than the newest tested one."""
    for name, newest in newest_tested().items():
        here = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(here, str) and _numbers(here) > _numbers(newest):
            log_once(
                f"{name} {here} is newer than the newest release that was tested, {newest}: if something is refused or "
                f"slower than before, compare with `pip install '{name}<={newest}'`"
            )


@functools.cache
def newest_tested() -> dict[str, str]:
    """Return the newest tested release by module name: the upper bounds of the extras in this package's metadata."""
    try:
        required = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # a tree on Python's path
        return {}
    bounds = [match.groups() for line in required if (match := _BOUND.match(line))]
    return {name.replace("-", "_"): newest for name, newest in bounds}


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
