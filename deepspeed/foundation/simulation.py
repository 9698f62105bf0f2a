"""The switch of a simulation: this process runs an engine whose tensors have no values, in a world that is not there.

What would act on the outside asks it: native code computes nothing, messages have nobody to go to, a disk only counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

_running: list[tuple[bool, bool]] = []  # whether messages are late, and whether tensors stand for a device's


def simulating() -> bool:
    """Whether this process simulates."""
    return bool(_running)


def late() -> bool:
    """Whether the ranks that are not there answer only when they are waited for."""
    return bool(_running) and _running[-1][0]


def of_device() -> bool:
    """Whether the CPU's tensors stand for those of a device: messages go the ways of its backend."""
    return bool(_running) and _running[-1][1]


@contextlib.contextmanager
def simulation(*, late: bool = False, device: bool = False) -> Generator[None]:
    """Inside, this process simulates.

    Args:
        late: other ranks answer only when they are waited for; else at once.
        device: the CPU's tensors stand for those of a device.
    """
    _running.append((late, device))
    try:
        yield
    finally:
        _running.pop()
