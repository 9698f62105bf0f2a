"""Tensors to and from files, several requests at a time and past the page cache, while the caller computes."""

from __future__ import annotations

from deepspeed.ops.aio.builder import AsyncIOBuilder
from deepspeed.ops.aio.handle import aio_handle

__all__ = ["AsyncIOBuilder", "aio_handle"]
