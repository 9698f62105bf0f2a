"""Host buffers that are allocated once and reused, aligned for direct I/O.

[Note: the end of a loan] A copy between a pinned buffer and a device continues after the call that started it. Code
that returns such a buffer passes the copy, and the buffer is reused after the copy has finished.
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
    """Copy that may outlast the use of a buffer; see `deepspeed.storage.async_copy.PendingCopy`."""

    def done(self) -> bool:
        """Whether the copy has finished."""
        ...

    def wait(self) -> None:
        """Block the host until the copy has finished."""
        ...


class BufferPool:
    """Pool of aligned host memory; safe to use from several threads.

    A returned buffer serves the next request of the same size, in whole blocks of `ALIGNMENT`, never a smaller request.
    Memory is freed once the pool and its borrowed tensors are gone.

    Args:
        pin: lock the pages if there is a device, so that it copies asynchronously.

    Attributes:
        allocations: number of buffers allocated so far; constant once a training step has settled.
        nbytes: bytes of all buffers, borrowed or not.
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
        """Borrow a uint8 tensor of `nbytes` bytes, contents unspecified, until `put`."""
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
        """Return a tensor from `take`, or any view of it.

        Args:
            tensor: borrowed from this pool.
            after: a copy from or to the tensor that may be in progress; the buffer is reused only after its end.

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
        """Free the buffers that are not borrowed; waits for copies in progress."""
        with self._lock:
            for returning in self._returning.values():
                for _, copying in returning:
                    copying.wait()
            self._returning.clear()
            self._free.clear()
            self.nbytes = sum(buffer.nbytes for buffer in self._lent.values())

    def buffers(self) -> list[torch.Tensor]:
        """All buffers, borrowed or not."""
        with self._lock:
            returning = [buffer for each in self._returning.values() for buffer, _ in each]
            return [*self._lent.values(), *(buffer for unused in self._free.values() for buffer in unused), *returning]

    @property
    def idle(self) -> bool:
        """Whether no buffer is borrowed and no copy is in progress."""
        with self._lock:
            under_way = (copying for returning in self._returning.values() for _, copying in returning)
            return not self._lent and all(copying.done() for copying in under_way)

    def _reclaim(self, size: int) -> None:
        """Take back buffers with finished copies, or the oldest one if too many copies are in progress."""
        returning, free = self._returning[size], self._free.setdefault(size, [])
        while returning and returning[0][1].done():
            free.append(returning.popleft()[0])
        if not free and len(returning) >= _MOST_RETURNING:
            buffer, copying = returning.popleft()
            copying.wait()
            free.append(buffer)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
