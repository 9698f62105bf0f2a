"""Predictions make a world of their own: whatever process group an earlier test left to this process is ended."""

from __future__ import annotations

import pytest

from deepspeed import comm


@pytest.fixture(autouse=True)
def _alone() -> None:
    if comm.is_initialized():
        comm.destroy_process_group()
