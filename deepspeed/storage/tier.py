"""Interface of storage tiers: places (device, host, disk) for flat tensors, acquired for use and then released."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed.storage.buffer_pool import BufferPool, Copying


class StoredTensor(ABC):
    """Flat (1-D) tensor in a storage tier.

    Contract of every tier (checked by `tests/unit/storage/test_tier_contract.py`): the elements of a new tensor are 0.
    Values written between `acquire` and `release(changed=True)` are returned by every later `acquire`. Nested calls of
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
        """Hint that the tensor will be acquired soon, so that a slow tier starts to read it."""
        return None

    @abstractmethod
    def acquire(self, read: bool = True) -> torch.Tensor:
        """Return the values as a 1-D tensor on `Tier.lends_on`, valid until `release`.

        Args:
            read: False if the caller overwrites all elements; the returned values are then unspecified.
        """

    @abstractmethod
    def release(self, changed: bool) -> None:
        """End the use of one `acquire`.

        Args:
            changed: whether the caller has written to the tensor, so that the new values must be stored.
        """

    def bring(self, into: torch.Tensor) -> bool:
        """Start to read the stored values directly into a tensor of the caller; `brought` waits for the end.

        Args:
            into: contiguous tensor of the stored size and dtype; must not be used until `brought` returns.

        Returns:
            False if nothing was started because a direct read is not possible; use `acquire` then.
        """
        return False

    def brought(self) -> None:
        """Wait for the read that `bring` started; raises StorageError if it failed."""
        return None

    def replace(self, values: torch.Tensor) -> None:
        """Overwrite all elements.

        Args:
            values: 1-D tensor of the stored size and dtype, on any device.
        """
        with self.borrowed(changed=True, read=False) as lent:
            lent.copy_(values)

    def use_until(self, copying: Copying) -> None:
        """Register an asynchronous copy from acquired memory that may end after `release`; call before `release`."""
        self._in_use = copying

    def end_use(self) -> Copying | None:
        """Return and unregister the copy of `use_until`, which the caller must wait for; None if there is none."""
        copying, self._in_use = self._in_use, None
        return copying

    @abstractmethod
    def drop(self) -> None:
        """Discard the values and free their memory or disk space; the tensor must not be used afterwards."""

    @property
    def memory(self) -> torch.Tensor | None:
        """Return the tensor that stores the values in memory; None if they are stored on disk."""
        return None

    @contextlib.contextmanager
    def borrowed(self, changed: bool = False, read: bool = True) -> Iterator[torch.Tensor]:
        """Acquire the tensor for a `with` block and release it afterwards; see `acquire` and `release`.

        If the block raises, the tensor is released with `changed=False`.
        """
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
    """Storage place for tensors: device, host memory or disk.

    Attributes:
        name: value of `offload_optimizer.device` that selects the tier: "none", "cpu" or "nvme".
        moves: whether the address of a tensor can differ from one `acquire` to the next.
        pool: pool of host buffers; None for the device tier.
    """

    name: str
    moves: bool
    pool: BufferPool | None

    @abstractmethod
    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        """Create a tensor of zeros in this tier.

        Args:
            label: name for error messages.
            numel: number of elements.
            dtype: dtype of the elements.
            device: device of the parameters; the device tier allocates there.
        """

    @abstractmethod
    def lends_on(self, device: torch.device) -> torch.device:
        """Return the device of the tensors that `acquire` returns, given the device of the parameters."""
