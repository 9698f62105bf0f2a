"""Interface of a tier: it stores flat tensors, which are acquired for computation and released afterwards."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed.storage.buffer_pool import BufferPool, Copying


class StoredTensor(ABC):
    """Flat tensor in a tier.

    Contract of every tier (checked by `tests/unit/storage/test_tier_contract.py`): a new tensor holds zeros. Values
    written between `acquire` and `release(changed=True)` are returned by every later `acquire`. Nested calls of
    `acquire` return the same memory. Acquired memory is contiguous and keeps its values until it is released.

    Args:
        label: name for error messages.
        numel: number of elements.
        dtype: dtype of the elements.
    """

    def __init__(self, label: str, numel: int, dtype: torch.dtype) -> None:
        self.label, self.numel, self.dtype = label, numel, dtype
        self._in_use: Copying | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def prefetch(self) -> None:
        """Hint that the tensor will be acquired soon: start slow transfers."""
        return None

    @abstractmethod
    def acquire(self, read: bool = True) -> torch.Tensor:
        """Return the values in memory for computation: 1-D, valid until `release`.

        Args:
            read: False if the caller overwrites everything; the values are then unspecified.
        """

    @abstractmethod
    def release(self, changed: bool) -> None:
        """End one `acquire`; with `changed`, new values are stored."""

    def bring(self, into: torch.Tensor) -> bool:
        """Start to fill `into` directly from the stored values, until `brought`; False: unsupported, use `acquire`.

        Args:
            into: contiguous, of the stored size and dtype; must not be used until `brought`.
        """
        return False

    def brought(self) -> None:
        """Wait for the transfer of `bring`; raises StorageError if it failed."""
        return None

    def replace(self, values: torch.Tensor) -> None:
        """Replace all values.

        Args:
            values: 1-D, of the stored size and dtype.
        """
        with self.borrowed(changed=True, read=False) as lent:
            lent.copy_(values)

    def use_until(self, copying: Copying) -> None:
        """Register a copy of acquired memory that continues after `release`; call this before `release`."""
        self._in_use = copying

    def end_use(self) -> Copying | None:
        """Return a registered copy that may still be in progress; the caller must wait for it."""
        copying, self._in_use = self._in_use, None
        return copying

    @abstractmethod
    def drop(self) -> None:
        """Discard the values."""

    @property
    def memory(self) -> torch.Tensor | None:
        """Memory of the stored values; None if they are not in memory."""
        return None

    @contextlib.contextmanager
    def borrowed(self, changed: bool = False, read: bool = True) -> Iterator[torch.Tensor]:
        """Context that acquires and releases; after an error, the values count as unchanged."""
        lent = self.acquire(read)
        copying = self.end_use() if changed else None
        if copying is not None:
            copying.wait()  # the device may still read the old values
        keeps_change = False
        try:
            yield lent
            keeps_change = changed
        finally:
            self.release(keeps_change)


class Tier(ABC):
    """Place where tensors are stored.

    Attributes:
        name: name in the JSON (`offload_optimizer.device`): "none", "cpu" or "nvme".
        moves: whether acquired memory differs from the stored memory, so that addresses change between uses.
        pool: host buffers, for tiers outside of the device.
    """

    name: str
    moves: bool
    pool: BufferPool | None

    @abstractmethod
    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        """Create a flat tensor of zeros in this tier; `device` is the device of the parameters."""

    @abstractmethod
    def lends_on(self, device: torch.device) -> torch.device:
        """Return the device of acquired tensors, for parameters on `device`."""
