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

# Buffers of one size whose copies may be under way at once: one more is waited for, so that a host that runs ahead of
# its device does not lock ever more memory.
_MOST_RETURNING = 4


class Copying(Protocol):
    """What a loan may outlast: see `deepspeed.storage.async_copy.PendingCopy`."""

    def done(self) -> bool:
        """Whether it is over."""
        ...

    def wait(self) -> None:
        """Block the host until it is over."""
        ...


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
        """Return what `take` gave, or any view of it.

        Args:
            tensor: lent by this pool.
            after: a copy from or to it that may be under way; the buffer is not lent before its end.

        Raises:
            UsageError: the tensor is not lent by this pool, or was put back before.
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
        """Let the memory go of buffers that are not lent; waits for copies under way."""
        with self._lock:
            for returning in self._returning.values():
                for _, copying in returning:
                    copying.wait()
            self._returning.clear()
            self._free.clear()
            self.nbytes = sum(buffer.nbytes for buffer in self._lent.values())

    def buffers(self) -> list[torch.Tensor]:
        """Every buffer, lent or not."""
        with self._lock:
            returning = [buffer for each in self._returning.values() for buffer, _ in each]
            return [*self._lent.values(), *(buffer for unused in self._free.values() for buffer in unused), *returning]

    @property
    def idle(self) -> bool:
        """Whether nothing is lent and no copy is under way."""
        with self._lock:
            under_way = (copying for returning in self._returning.values() for _, copying in returning)
            return not self._lent and all(copying.done() for copying in under_way)

    def _reclaim(self, size: int) -> None:
        """Bring buffers back whose copies are over, or the oldest when too many are under way."""
        returning, free = self._returning[size], self._free.setdefault(size, [])
        while returning and returning[0][1].done():
            free.append(returning.popleft()[0])
        if not free and len(returning) >= _MOST_RETURNING:
            buffer, copying = returning.popleft()
            copying.wait()
            free.append(buffer)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
