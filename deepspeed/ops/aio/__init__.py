"""Asynchronous tensor I/O: several requests at a time, past the page cache if the file system supports it."""

from __future__ import annotations

from deepspeed.ops.aio.builder import AsyncIOBuilder
from deepspeed.ops.aio.handle import aio_handle

__all__ = ["AsyncIOBuilder", "aio_handle"]
