"""The tier of tensors in host memory: pooled buffers, pinned where there is a device."""

from __future__ import annotations

import torch

from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import Resident
from deepspeed.storage.tier import StoredTensor, Tier

CPU = torch.device("cpu")


class _Pooled(Resident):
    """A tensor over a buffer of a pool, which gets it back at the end."""

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
    """Tensors rest in host memory, on CPU ranks too in buffers of their own.

    Args:
        pool: where buffers come from.
    """

    name, moves = "cpu", False
    pool: BufferPool

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        return _Pooled(label, self.pool, numel, dtype)

    def lends_on(self, device: torch.device) -> torch.device:
        """The host: what rests here is computed on by the CPU."""
        return CPU
