"""Limits of a ragged engine: sequences, tokens, cache memory."""

from __future__ import annotations

from deepspeed.inference.v2.ragged.manager_configs import (
    AllocationMode,
    DSStateManagerConfig,
    KVCacheConfig,
    MemoryConfig,
)

__all__ = ["AllocationMode", "DSStateManagerConfig", "KVCacheConfig", "MemoryConfig"]
