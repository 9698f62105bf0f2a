"""Configuration of sequences, tokens and memory of a ragged engine."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from deepspeed.config.base_model import DeepSpeedConfigModel
from deepspeed.errors import NotAvailableError


class AllocationMode(Enum):
    """Meaning of `MemoryConfig.size`: memory to leave free, or blocks to allocate."""

    RESERVE = "reserve"
    ALLOCATE = "allocate"


class MemoryConfig(DeepSpeedConfigModel):
    """Cache memory. `reserve`: leave `size` bytes free, use the other memory as needed; `allocate`: `size` blocks."""

    mode: AllocationMode = AllocationMode.RESERVE
    size: PositiveInt = 1_000_000_000


class KVCacheConfig(DeepSpeedConfigModel):
    """Contents of a cache block; set by the engine."""

    block_size: int = 64
    num_allocation_groups: PositiveInt = 1
    cache_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    cache_dtype: Any = None
    max_blocks_per_allocation_group: PositiveInt = 64


class DSStateManagerConfig(DeepSpeedConfigModel):
    """Limits of tracked sequences and of one pass."""

    max_tracked_sequences: PositiveInt = 2048
    max_ragged_batch_size: PositiveInt = 768
    max_ragged_sequence_count: PositiveInt = 512
    max_context: PositiveInt = 8192
    memory_config: MemoryConfig = Field(default_factory=MemoryConfig)
    offload: bool = False

    @field_validator("offload")
    @classmethod
    def _no_offload(cls, value: bool) -> bool:
        if value:
            raise NotAvailableError("state_manager.offload: keys and values stay on the device; leave it false")
        return value

    @model_validator(mode="after")
    def _fits(self) -> DSStateManagerConfig:
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            if self.max_ragged_sequence_count > getattr(self, name):
                raise ValueError(
                    f"max_ragged_sequence_count {self.max_ragged_sequence_count} is more than "
                    f"{name} {getattr(self, name)}"
                )
        return self
