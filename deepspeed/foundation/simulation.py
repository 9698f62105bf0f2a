"""The switch of a simulation: this process runs an engine whose tensors have no values, in a world that is not there.

What would act on the outside asks it: native code computes nothing, messages have nobody to go to, a disk only counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_depth = 0


def simulating() -> bool:
    """Whether this process simulates."""
    return _depth > 0


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Inside, this process simulates."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
