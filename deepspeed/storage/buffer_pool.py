"""Host buffers that are allocated once and lent again and again, aligned for direct I/O."""

from __future__ import annotations

import threading

import torch

from deepspeed.errors import UsageError
from deepspeed.ops.aio.files import ALIGNMENT
from deepspeed.ops.aio.memory import aligned_bytes


class BufferPool:
    """Lends aligned host memory; safe to use from several threads.

    A buffer that was put back serves the next request of the same size, in whole blocks of `ALIGNMENT`; no request is
    served by a larger one. Memory goes back to the system when the pool and the tensors it lent are gone.

    Args:
        pin: lock the pages where there is a device, so that it copies without waiting.

    Attributes:
        allocations: buffers allocated since the pool was made; it stands still once a training step has settled.
        nbytes: bytes of all its buffers, lent or not.
    """

    def __init__(self, *, pin: bool = True) -> None:
        self._pin = pin
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lent: dict[int, torch.Tensor] = {}
        self.allocations = 0
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Borrow a uint8 tensor of `nbytes` bytes, contents unspecified, until `put`."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            free = self._free.get(size)
            if free:
                buffer = free.pop()
            else:
                buffer = aligned_bytes(size, pin=self._pin)
                self.allocations += 1
                self.nbytes += size
            self._lent[_key(buffer)] = buffer
        return buffer[:nbytes]

    def put(self, tensor: torch.Tensor) -> None:
        """Return what `take` gave, or any view of it.

        Raises:
            UsageError: the tensor is not lent by this pool, or was put back before.
        """
        with self._lock:
            buffer = self._lent.pop(_key(tensor), None)
            if buffer is None:
                raise UsageError(
                    f"a buffer of {tensor.nbytes} bytes was put into a pool that has not lent it: it was put back "
                    "before or taken from elsewhere"
                )
            self._free.setdefault(buffer.nbytes, []).append(buffer)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
