"""Builders by the names user code asks for; only the aio handle has one, the other kernels are reached directly."""

from __future__ import annotations

from deepspeed.ops.aio import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
