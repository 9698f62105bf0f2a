"""Host buffers that are allocated once and reused, aligned for direct I/O.

[Note: the end of a loan] A copy between a pinned buffer and a device continues after the call that started it. The
caller passes this copy to `BufferPool.put`, and the pool reuses the buffer only after the copy has finished.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Protocol

import torch

from deepspeed.errors import UsageError
from deepspeed.ops.aio.files import ALIGNMENT
from deepspeed.ops.aio.memory import aligned_bytes

# Maximum buffers of one size with copies in progress: the pool then waits, so that a host ahead of its device does not
# lock more and more memory.
_MOST_RETURNING = 4


class Copying(Protocol):
    """Asynchronous copy from or to a buffer; implemented by `deepspeed.storage.async_copy.PendingCopy`."""

    def done(self) -> bool:
        """Return whether the copy has finished."""
        ...

    def wait(self) -> None:
        """Block the host until the copy has finished."""
        ...


class BufferPool:
    """Thread-safe pool of host buffers, aligned for direct I/O.

    Sizes are rounded up to multiples of `ALIGNMENT` bytes, and a returned buffer is reused only for requests of the
    same rounded size. Memory is freed by `shrink`, or once the pool and the tensors borrowed from it are deleted.

    Args:
        pin: pin the memory if there is a device, so that copies to and from it can be asynchronous.

    Attributes:
        allocations: number of buffers allocated so far; constant after the first training steps.
        nbytes: total size of all buffers in bytes, borrowed or not.
    """

    def __init__(self, *, pin: bool = True) -> None:
        self._pin = pin
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lent: dict[int, torch.Tensor] = {}
        self._returning: defaultdict[int, deque[tuple[torch.Tensor, Copying]]] = defaultdict(deque)  # oldest first
        self.allocations = 0
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Borrow a 1-D uint8 tensor of `nbytes` elements with unspecified contents until `put`; may wait for a copy."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._reclaim(size)
            free = self._free.get(size)
            if free:
                buffer = free.pop()
            else:
                buffer = aligned_bytes(size, pin=self._pin)
                self.allocations += 1
                self.nbytes += size
            self._lent[_key(buffer)] = buffer
        return buffer[:nbytes]

    def put(self, tensor: torch.Tensor, after: Copying | None = None) -> None:
        """Give a borrowed buffer back to the pool.

        Args:
            tensor: tensor from `take`, or any view of it.
            after: copy from or to the tensor that may still be in progress; the buffer is reused once it has finished.

        Raises:
            UsageError: the tensor is not from this pool, or was returned before.
        """
        with self._lock:
            buffer = self._lent.pop(_key(tensor), None)
            if buffer is None:
                raise UsageError(
                    f"a buffer of {tensor.nbytes} bytes was returned to a pool that had not given it out: it was "
                    "returned twice, or is from elsewhere"
                )
            if after is None:
                self._free.setdefault(buffer.nbytes, []).append(buffer)
            else:
                self._returning[buffer.nbytes].append((buffer, after))

    def shrink(self) -> None:
        """Free all buffers that are not borrowed, after waiting for copies in progress."""
        with self._lock:
            for returning in self._returning.values():
                for _, copying in returning:
                    copying.wait()
            self._returning.clear()
            self._free.clear()
            self.nbytes = sum(buffer.nbytes for buffer in self._lent.values())

    def buffers(self) -> list[torch.Tensor]:
        """Return all buffers, borrowed or not."""
        with self._lock:
            returning = [buffer for each in self._returning.values() for buffer, _ in each]
            return [*self._lent.values(), *(buffer for unused in self._free.values() for buffer in unused), *returning]

    @property
    def idle(self) -> bool:
        """Return whether no buffer is borrowed and no copy is in progress."""
        with self._lock:
            under_way = (copying for returning in self._returning.values() for _, copying in returning)
            return not self._lent and all(copying.done() for copying in under_way)

    def _reclaim(self, size: int) -> None:
        """Make buffers with finished copies reusable; if none is free and too many copies run, wait for the oldest."""
        returning, free = self._returning[size], self._free.setdefault(size, [])
        while returning and returning[0][1].done():
            free.append(returning.popleft()[0])
        if not free and len(returning) >= _MOST_RETURNING:
            buffer, copying = returning.popleft()
            copying.wait()
            free.append(buffer)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
