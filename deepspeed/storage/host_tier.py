"""Storage tier in host memory: tensors in pooled buffers, pinned if there is a device."""

from __future__ import annotations

import torch

from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import Resident
from deepspeed.storage.tier import StoredTensor, Tier

CPU = torch.device("cpu")


class _Pooled(Resident):
    """Stored tensor in a pooled host buffer, which `drop` returns to the pool."""

    def __init__(self, label: str, pool: BufferPool, numel: int, dtype: torch.dtype) -> None:
        self._buffer = pool.take(numel * dtype.itemsize)
        super().__init__(label, self._buffer.view(dtype).zero_())
        self._pool = pool

    def drop(self) -> None:
        if self._buffer.numel() or not self.numel:
            self._pool.put(self._buffer, after=self.end_use())
            self._buffer = self._buffer.new_empty(0)
        super().drop()


class HostTier(Tier):
    """Storage tier in host memory (`device: cpu`).

    Args:
        pool: pool from which each stored tensor borrows one buffer.
    """

    name, moves = "cpu", False
    pool: BufferPool

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        return _Pooled(label, self.pool, numel, dtype)

    def lends_on(self, device: torch.device) -> torch.device:
        """Return the CPU device: acquired tensors are in host memory."""
        return CPU
