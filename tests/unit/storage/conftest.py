"""Every test of block I/O runs on the native queue and on its twin of Python threads."""

from __future__ import annotations

import pytest

from deepspeed.native import library
from deepspeed.ops.aio import queue


@pytest.fixture(params=["threads", *(["native"] if library() else [])])
def engine(request, monkeypatch):
    """Which queue serves."""
    if request.param == "threads":
        monkeypatch.setattr(queue, "library", lambda: None)
    return request.param
