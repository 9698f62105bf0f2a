"""Native library for simulations: every function exists and does nothing."""

from __future__ import annotations

import ctypes
from typing import Any, cast


class _NoOpFunction:
    """Native function that accepts any arguments, changes nothing and returns 0."""

    argtypes: Any = ()
    restype: Any = None

    def __call__(self, *_: Any) -> int:
        return 0


class _SimulatedLibrary:
    def __getattr__(self, name: str) -> _NoOpFunction:
        function = _NoOpFunction()
        setattr(self, name, function)
        return function


def simulated_library(_loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Return a library whose functions do nothing, for runs without tensor values; the argument has no effect."""
    return cast(ctypes.CDLL, _library)


_library = _SimulatedLibrary()
