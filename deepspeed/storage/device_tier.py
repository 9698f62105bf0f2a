"""Storage tier on the device of the computation: `acquire` returns the stored tensor itself."""

from __future__ import annotations

import torch

from deepspeed.errors import UsageError
from deepspeed.storage.async_copy import mover_of
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.tier import StoredTensor, Tier


class Evicted:
    """Device tensor with its values in host memory and its device storage resized to 0 bytes.

    Args:
        tensor: tensor with a resizable storage; it and its views must not be used until `restore`.
        pool: pool from which the host buffer is borrowed until `restore`.
    """

    def __init__(self, tensor: torch.Tensor, pool: BufferPool) -> None:
        self._storage, self._pool = tensor.untyped_storage(), pool
        self._buffer = pool.take(self._storage.nbytes())
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)
        self._buffer.copy_(self._bytes)
        self._storage.resize_(0)

    def restore(self, non_blocking: bool = False) -> None:
        """Copy the values back to the device; `non_blocking`: the current stream waits for the copy, not the host."""
        self._storage.resize_(self._buffer.numel())
        arrival = None
        if non_blocking:
            arrival = mover_of(self._bytes.device).copy(self._bytes, self._buffer)
            arrival.before_current()
        else:
            self._bytes.copy_(self._buffer)
        self._pool.put(self._buffer, after=arrival)


class Resident(StoredTensor):
    """Stored tensor in the memory in which it is used, so that `acquire` copies nothing.

    Args:
        label: name for error messages.
        tensor: 1-D contiguous tensor, used without a copy.
    """

    def __init__(self, label: str, tensor: torch.Tensor) -> None:
        super().__init__(label, tensor.numel(), tensor.dtype)
        self._tensor = tensor
        self._evicted: Evicted | None = None

    @property
    def memory(self) -> torch.Tensor | None:
        return self._tensor

    def acquire(self, read: bool = True) -> torch.Tensor:
        """Return the stored tensor itself; `read` has no effect.

        Raises:
            UsageError: the values were evicted and have not been restored.
        """
        if self._evicted is not None:
            raise UsageError(f"{self.label} were moved by engine.offload_states(); call engine.reload_states() first")
        return self._tensor

    def evict(self, pool: BufferPool) -> None:
        """Move the values to host memory and free the device storage until `restore`, if the storage is resizable."""
        if self._evicted is None and self._tensor.untyped_storage().resizable():
            self._evicted = Evicted(self._tensor, pool)

    def restore(self, non_blocking: bool = False) -> None:
        """Copy evicted values back to the device (see `Evicted.restore`); do nothing if none were evicted."""
        if self._evicted is not None:
            self._evicted.restore(non_blocking)
            self._evicted = None

    def release(self, changed: bool) -> None:
        """Do nothing: `acquire` returned the stored memory, so changes are already stored."""

    def drop(self) -> None:
        self._tensor = self._tensor.new_empty(0)


class ResidentTier(Tier):
    """Storage tier on the device of the parameters (no offload)."""

    name, moves, pool = "none", False, None

    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        return Resident(label, torch.zeros(numel, dtype=dtype, device=device))

    def lends_on(self, device: torch.device) -> torch.device:
        return device


RESIDENT = ResidentTier()
