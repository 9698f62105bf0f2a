"""The switch of a simulation: this process runs an engine whose tensors have no values, in a world that is not there.

What would act on the outside asks it: native code computes nothing, messages have nobody to go to, a disk only counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

_running: list[bool] = []  # whether messages are late


def simulating() -> bool:
    """Whether this process simulates."""
    return bool(_running)


def late() -> bool:
    """Whether the ranks that are not there answer only when they are waited for."""
    return bool(_running) and _running[-1]


@contextlib.contextmanager
def simulation(*, late: bool = False) -> Generator[None]:
    """Inside, this process simulates.

    Args:
        late: other ranks answer only when they are waited for; else at once.
    """
    _running.append(late)
    try:
        yield
    finally:
        _running.pop()
