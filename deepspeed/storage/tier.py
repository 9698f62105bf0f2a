"""The interface of a tier: it stores flat tensors, which are acquired for computation and released after it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed.storage.buffer_pool import BufferPool, Copying


class StoredTensor(ABC):
    """A flat tensor that rests in a tier.

    The contract every tier keeps, shown by `tests/unit/storage/test_tier_contract.py`: a new one holds zeros; what was
    written between `acquire` and `release(changed=True)` is what every later `acquire` sees; borrowing again before
    giving back lends the same memory; what is lent is contiguous and keeps its values until it is given back.

    Args:
        label: what it is, for error reports.
        numel: elements.
        dtype: their dtype.
    """

    def __init__(self, label: str, numel: int, dtype: torch.dtype) -> None:
        self.label, self.numel, self.dtype = label, numel, dtype
        self._in_use: Copying | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def prefetch(self) -> None:
        """It will be borrowed soon: start what takes time."""
        return None

    @abstractmethod
    def acquire(self, read: bool = True) -> torch.Tensor:
        """The values where they can be computed on: 1-D, valid until given back.

        Args:
            read: False when everything will be overwritten; the values are then unspecified.
        """

    @abstractmethod
    def release(self, changed: bool) -> None:
        """End one `acquire`; `changed` says that new values are to be kept."""

    def bring(self, into: torch.Tensor) -> bool:
        """Begin to fill `into` straight from where the values rest, until `brought`; False: they have to be borrowed.

        Args:
            into: contiguous, of the stored size and dtype; it belongs to the tier meanwhile.
        """
        return False

    def brought(self) -> None:
        """Wait for what `bring` began; raises StorageError where it failed."""
        return None

    def replace(self, values: torch.Tensor) -> None:
        """Take new values for all there are.

        Args:
            values: 1-D, of the stored size and dtype.
        """
        with self.borrowed(changed=True, read=False) as lent:
            lent.copy_(values)

    def use_until(self, copying: Copying) -> None:
        """A copy of what is lent goes on after it was given back; called before that."""
        self._in_use = copying

    def end_use(self) -> Copying | None:
        """The copy that may still be under way; who asks sees to its end."""
        copying, self._in_use = self._in_use, None
        return copying

    @abstractmethod
    def drop(self) -> None:
        """The values are not needed any more."""

    @property
    def memory(self) -> torch.Tensor | None:
        """The memory the values rest in; None when they rest outside of it."""
        return None

    @contextlib.contextmanager
    def borrowed(self, changed: bool = False, read: bool = True) -> Iterator[torch.Tensor]:
        """Borrow for the length of a `with` block; after an error nothing counts as changed."""
        lent = self.acquire(read)
        copying = self.end_use() if changed else None
        if copying is not None:
            copying.wait()  # the device reads what is to be overwritten
        keeps_change = False
        try:
            yield lent
            keeps_change = changed
        finally:
            self.release(keeps_change)


class Tier(ABC):
    """A place for tensors.

    Attributes:
        name: as the JSON spells it (`offload_optimizer.device`): "none", "cpu" or "nvme".
        moves: what is borrowed lies elsewhere than what rests, so addresses change from one borrow to the next.
        pool: host buffers, of tiers that are not on the device.
    """

    name: str
    moves: bool
    pool: BufferPool | None

    @abstractmethod
    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        """A new flat tensor of zeros whose home is this tier; `device` is where parameters compute."""

    @abstractmethod
    def lends_on(self, device: torch.device) -> torch.device:
        """Where borrowed tensors lie, when parameters compute on `device`."""
