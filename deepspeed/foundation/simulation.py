"""The switch of a simulation: this process runs an engine whose tensors have no values, in a world that is not there.

What would act on the outside asks it: native code computes nothing, messages have nobody to go to, a disk only counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

_running: list[object] = []


def simulating() -> bool:
    """Whether this process simulates."""
    return bool(_running)


@contextlib.contextmanager
def simulation() -> Generator[None]:
    """Inside, this process simulates."""
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()
