"""Storage tier on a local disk: prefetched reads and asynchronous writes through pooled host buffers.

[Note: buffers] Each acquired tensor has a buffer; their number is not limited. In addition, at most `buffers` tensors
are prefetched (all others are read by `acquire`), and at most `buffers` tensors have a write in progress (`release`
then waits for the oldest write). The memory for buffers therefore does not depend on the speed of the disk. Transfers
directly to or from the caller's memory need no buffer.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque

import torch

from deepspeed.errors import StorageError
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.host_tier import CPU
from deepspeed.storage.tensor_file import Disk, Extent, Transfer
from deepspeed.storage.tier import StoredTensor, Tier


class _OnDisk(StoredTensor):
    """Stored tensor in an extent of the disk; has a host buffer only while prefetched, acquired or being written."""

    def __init__(self, label: str, tier: NvmeTier, numel: int, dtype: torch.dtype) -> None:
        super().__init__(label, numel, dtype)
        self._tier = tier
        self._extent = tier.reserve(label, self.nbytes)
        self._written = False  # never written: the values are zeros
        self._buffer: torch.Tensor | None = None
        self._transfer: Transfer | None = None  # transfer between the buffer and the disk
        self._straight: Transfer | None = None  # transfer between the caller's memory and the disk
        self._users, self._dirty = 0, False

    def prefetch(self) -> None:
        """Start to read into a buffer, unless the limit of prefetched tensors is reached."""
        with self._tier.lock:
            if self._buffer is None and len(self._tier.prefetching) < self._tier.most_ahead:
                self._load(read=True)
                self._tier.prefetching.add(self)

    def bring(self, into: torch.Tensor) -> bool:
        """Start to read directly into `into`; False if values are in a buffer or unwritten, or `into` is unsuitable."""
        with self._tier.lock:
            self._end_straight()
            if self._buffer is not None or not self._written or not self._straight_for(into):
                return False
            self._straight = self._tier.disk.read(self._extent, into)
            return True

    def brought(self) -> None:
        with self._tier.lock:
            self._end_straight()

    def replace(self, values: torch.Tensor) -> None:
        """Write directly from `values` and wait; if that is not possible, copy through a buffer."""
        with self._tier.lock:
            self._end_straight()
            if self._buffer is None and self._straight_for(values):
                self._tier.disk.write(self._extent, values).wait()
                self._written = True
                return
        super().replace(values)

    def _straight_for(self, memory: torch.Tensor) -> bool:
        """Return whether a tensor can be read or written directly, without a buffer."""
        return memory.device.type == "cpu" and memory.is_contiguous() and memory.nbytes == self.nbytes > 0

    def _end_straight(self) -> None:
        transfer, self._straight = self._straight, None
        if transfer is not None:
            transfer.wait()

    def acquire(self, read: bool = True) -> torch.Tensor:
        """Return the values in a pooled host buffer, after waiting for the read.

        Raises:
            StorageError: this read, or an earlier write of the tensor, failed.
        """
        with self._tier.lock:
            self._tier.forget(self)
            if self._buffer is None:
                self._load(read)
            buffer = self.settle()
            self._users += 1
            return buffer.view(self.dtype)

    def release(self, changed: bool) -> None:
        """Write changed values back after the last nested release, and wait for writes above the limit of the tier."""
        with self._tier.lock:
            self._users -= 1
            self._dirty |= changed
            if self._users:
                return
            if self._dirty and self._buffer is not None and self.nbytes:
                self._dirty = False
                self._transfer = self._tier.disk.write(self._extent, self._buffer)
                self._written = True
                self._tier.behind.append(self)
                self._tier.limit()
            else:
                self.return_buffer()

    def drop(self) -> None:
        with self._tier.lock:
            self._tier.forget(self)
            with contextlib.suppress(StorageError):  # errors do not matter: the values are not needed any more
                self._end_straight()
            with contextlib.suppress(StorageError):
                self.return_buffer()
            self._written = False
            self._tier.leave(self._extent)

    def settle(self) -> torch.Tensor:
        """Wait for the transfer between the buffer and the disk, and return the buffer."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
        if self._buffer is None:
            raise RuntimeError(f"{self.label} has no buffer")
        return self._buffer

    def return_buffer(self) -> None:
        """Return the buffer to the pool after its transfer has finished."""
        if self._buffer is not None:
            try:
                self.settle()
            finally:
                self._tier.pool.put(self._buffer, after=self.end_use())
                self._buffer = None

    def _load(self, read: bool) -> None:
        """Borrow a buffer and, if `read`, start to fill it with the stored values."""
        self._end_straight()
        self._buffer = self._tier.pool.take(self.nbytes)
        if read and self._written:
            self._transfer = self._tier.disk.read(self._extent, self._buffer)
        elif read:
            self._buffer.zero_()


class NvmeTier(Tier):
    """Storage tier on a local disk (`device: nvme`).

    Args:
        disk: file with the extents of the tensors.
        pool: pool of the host buffers.
        buffers: maximum number of prefetched tensors, and of writes in progress (`buffer_count`); see [Note: buffers].
        reads_ahead: allow `prefetch` to start reads (`pipeline_read`).
        writes_behind: let `release` return before its write has finished (`pipeline_write`).
    """

    name, moves = "nvme", True
    pool: BufferPool

    def __init__(
        self, disk: Disk, pool: BufferPool, buffers: int, reads_ahead: bool = True, writes_behind: bool = True
    ) -> None:
        self.disk, self.pool = disk, pool
        self.most_ahead = buffers if reads_ahead else 0
        self._most_behind = buffers if writes_behind else 0
        self.lock = threading.RLock()  # the fetch thread also acquires slices
        self.prefetching: set[_OnDisk] = set()  # tensors with a prefetched buffer
        self.behind: deque[_OnDisk] = deque()  # tensors with a buffer for a write in progress, oldest first
        self.spare: dict[int, list[int]] = defaultdict(list)  # extents of dropped tensors, by size
        self._stored = 0  # number of tensors not dropped

    def store(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> StoredTensor:
        """Create a tensor of zeros and reserve its disk space; see `Tier.store`. StorageError if the disk is full."""
        self._stored += 1
        return _OnDisk(label, self, numel, dtype)

    def lends_on(self, device: torch.device) -> torch.device:
        """Return the CPU device: acquired tensors are in host memory."""
        return CPU

    def reserve(self, label: str, nbytes: int) -> Extent:
        """Return an extent of `nbytes` bytes: that of a dropped tensor of this size, else a new one (`Disk.create`)."""
        places = self.spare[nbytes]
        return Extent(label, nbytes, places.pop()) if places else self.disk.create(label, nbytes)

    def leave(self, extent: Extent) -> None:
        """Make the extent of a dropped tensor reusable; once no tensor is stored, free the pool's buffers too."""
        self.spare[extent.nbytes].append(extent.offset)
        self._stored -= 1
        if not self._stored:
            self.pool.shrink()

    def forget(self, stored: _OnDisk) -> None:
        """Exclude a tensor's buffer from both limits of [Note: buffers], since it is acquired or dropped."""
        self.prefetching.discard(stored)
        if stored in self.behind:
            self.behind.remove(stored)

    def limit(self) -> None:
        """Wait for the oldest writes until no more than the allowed number are in progress."""
        while len(self.behind) > self._most_behind:
            self.behind.popleft().return_buffer()
