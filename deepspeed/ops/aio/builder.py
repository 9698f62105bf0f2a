"""Operator builder of the aio handle; see `deepspeed.ops.op_builder`."""

from __future__ import annotations

from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
