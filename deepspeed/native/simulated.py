"""The native library of a simulation: every function exists and does nothing."""

from __future__ import annotations

import ctypes
from typing import Any, cast


class _NoOpFunction:
    """A native function: takes anything, changes nothing, returns 0."""

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
    """It stands where tensors have no values, for a library that is there."""
    return cast(ctypes.CDLL, _library)


_library = _SimulatedLibrary()
