"""A world of one that ends with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepspeed import comm


@pytest.fixture
def alone() -> Iterator[None]:
    before = comm.is_initialized()
    yield
    if comm.is_initialized() and not before:
        comm.destroy_process_group()
