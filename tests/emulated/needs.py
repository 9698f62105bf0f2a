"""What the tests of this folder need of the machine."""

from __future__ import annotations

import pytest

from tests.emulated.build import compiler

LIMIT = 100.0  # seconds of one run, its processes' start on a busy machine included


def need_compiler() -> None:
    """Skip the calling module by name where the emulated device cannot be compiled."""
    if compiler() is None:
        pytest.skip("the emulated device needs g++", allow_module_level=True)
