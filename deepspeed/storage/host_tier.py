"""Tier of tensors in host memory: pooled buffers, pinned if there is a device."""

from __future__ import annotations

import torch

from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import Resident
from deepspeed.storage.tier import StoredTensor, Tier

CPU = torch.device("cpu")


class _Pooled(Resident):
    """Tensor in a pooled buffer, which is returned to the pool at the end."""

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
    """Tier in host memory; also on CPU ranks, tensors get their own buffers.

    Args:
        pool: pool of the buffers.
    """

    name, moves = "cpu", False
    pool: BufferPool

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        return _Pooled(label, self.pool, numel, dtype)

    def lends_on(self, device: torch.device) -> torch.device:
        """Return the CPU: it computes on tensors of this tier."""
        return CPU
