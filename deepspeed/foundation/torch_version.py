"""Which torch this is."""

from __future__ import annotations

import re

import torch


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least `min_version` and at most `max_version`, by major and minor number.

    Args:
        min_version: such as 2.1 or "2.10" (as a number, 2.10 is 2.1).
        max_version: likewise.
    """
    here = _numbers(torch.__version__)
    at_least = min_version is None or here >= _numbers(min_version)
    return at_least and (max_version is None or here <= _numbers(max_version))


def _numbers(version: float | str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", f"{version}.0")[:2]
    return int(major), int(minor)
