"""The tier of tensors that stay on the device: acquiring one returns the tensor itself."""

from __future__ import annotations

import torch

from deepspeed.errors import UsageError
from deepspeed.storage.async_copy import mover_of
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.tier import StoredTensor, Tier


class Evicted:
    """The values of a tensor on the device while they are in host memory and its storage is empty.

    Args:
        tensor: owns a resizable storage; views of it are valid again after `restore`.
        pool: lends the host memory.
    """

    def __init__(self, tensor: torch.Tensor, pool: BufferPool) -> None:
        self._storage, self._pool = tensor.untyped_storage(), pool
        self._buffer = pool.take(self._storage.nbytes())
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)
        self._buffer.copy_(self._bytes)
        self._storage.resize_(0)

    def restore(self, non_blocking: bool = False) -> None:
        self._storage.resize_(self._buffer.numel())
        arrival = None
        if non_blocking:
            arrival = mover_of(self._bytes.device).copy(self._bytes, self._buffer)
            arrival.before_current()
        else:
            self._bytes.copy_(self._buffer)
        self._pool.put(self._buffer, after=arrival)


class Resident(StoredTensor):
    """A tensor that is computed on where it rests.

    Args:
        label: what it is.
        tensor: 1-D.
    """

    def __init__(self, label: str, tensor: torch.Tensor) -> None:
        super().__init__(label, tensor.numel(), tensor.dtype)
        self._tensor = tensor
        self._evicted: Evicted | None = None

    @property
    def memory(self) -> torch.Tensor | None:
        return self._tensor

    def acquire(self, read: bool = True) -> torch.Tensor:
        """The tensor itself.

        Raises:
            UsageError: its values were moved away for the time being.
        """
        if self._evicted is not None:
            raise UsageError(f"{self.label} were moved by engine.offload_states(); call engine.reload_states() first")
        return self._tensor

    def evict(self, pool: BufferPool) -> None:
        """Move the values to host memory and free theirs, until `restore`; views stay what they are."""
        if self._evicted is None and self._tensor.untyped_storage().resizable():
            self._evicted = Evicted(self._tensor, pool)

    def restore(self, non_blocking: bool = False) -> None:
        if self._evicted is not None:
            self._evicted.restore(non_blocking)
            self._evicted = None

    def release(self, changed: bool) -> None:
        """Nothing to do: it never left."""

    def drop(self) -> None:
        self._tensor = self._tensor.new_empty(0)


class ResidentTier(Tier):
    """Tensors rest on the device they are computed on."""

    name, moves, pool = "none", False, None

    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        return Resident(label, torch.zeros(numel, dtype=dtype, device=device))

    def lends_on(self, device: torch.device) -> torch.device:
        return device


RESIDENT = ResidentTier()
