"""Limits of a ragged engine on sequences, tokens and cache memory."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from deepspeed.config.base_model import DeepSpeedConfigModel


class AllocationMode(Enum):
    """Meaning of `MemoryConfig.size`: bytes of memory to leave free (RESERVE), or blocks to allocate (ALLOCATE)."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class MemoryConfig(DeepSpeedConfigModel):
    """Size of the KV cache.

    Args:
        mode: "reserve": use as much memory as the tracked sequences can need, but leave `size` bytes free; "allocate":
            `size` blocks.
        size: bytes or blocks, according to `mode`.
    """

    mode: AllocationMode = AllocationMode.RESERVE
    size: PositiveInt = 1_000_000_000


class KVCacheConfig(DeepSpeedConfigModel):
    """Layout of a cache block. Accepted for compatibility; the engine chooses the layout itself."""

    block_size: int = 64
    num_allocation_groups: PositiveInt = 1
    cache_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    cache_dtype: Any = None
    max_blocks_per_allocation_group: PositiveInt = 64


class DSStateManagerConfig(DeepSpeedConfigModel):
    """Section `state_manager`: limits of tracked sequences and of one pass.

    Args:
        max_tracked_sequences: maximum number of sequences with a KV cache.
        max_ragged_batch_size: maximum number of tokens in a pass.
        max_ragged_sequence_count: maximum number of sequences in a pass; not above the other two.
        max_context: maximum number of tokens of a sequence; the model's own limit also applies.
        memory_config: size of the KV cache.
        offload: not available; has to be False.
    """

    max_tracked_sequences: PositiveInt = 2048
    max_ragged_batch_size: PositiveInt = 768
    max_ragged_sequence_count: PositiveInt = 512
    max_context: PositiveInt = 8192
    memory_config: MemoryConfig = Field(default_factory=MemoryConfig)
    offload: bool = False

    @model_validator(mode="after")
    def _fits(self) -> DSStateManagerConfig:
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            if self.max_ragged_sequence_count > getattr(self, name):
                raise ValueError(
                    f"max_ragged_sequence_count {self.max_ragged_sequence_count} is more than "
                    f"{name} {getattr(self, name)}"
                )
        return self
