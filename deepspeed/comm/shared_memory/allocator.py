"""Allocation of tensors in memory that the other ranks of the machine can map."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from bisect import bisect
from collections import deque

import numpy as np
import torch

_PAGE = 4096
_REGION = 1 << 26  # bytes of a region at least: few regions, so few mappings in the peers
_GIVE_BACK = 1 << 20  # freed blocks of at least this size return their pages to the system


def shared_memory(nbytes: int) -> tuple[int, mmap.mmap]:
    """Create a zeroed memory file (memfd) of fixed size; returns its descriptor and its mapping.

    The file exists as long as a process has it open or mapped.
    """
    descriptor = os.memfd_create("deepspeed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    # No process can truncate the file while another one reads it.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor, _mapped(descriptor, nbytes)


def open_shared(process: int, descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the memory file of `nbytes` bytes that another process has open.

    Args:
        process: id of that process.
        descriptor: file descriptor in that process.

    Raises:
        OSError: the process has ended or is not visible, or the file has another size.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    with open(path, "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != nbytes:
            raise OSError(f"{path} is not the memory of {nbytes} bytes that was announced")
        return _mapped(file.fileno(), nbytes)


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, nbytes)
    with contextlib.suppress(OSError, AttributeError):  # an optimization
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class _Region:
    """One memory file, divided into blocks."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._owner = os.getpid()
        self.descriptor, self.memory = shared_memory(nbytes)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self.base = np.frombuffer(self.memory, dtype=np.uint8).ctypes.data
        self.free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, bytes), sorted, never adjacent
        self._returned: deque[tuple[int, int]] = deque()  # freed blocks that `collect` has not merged yet

    def take(self, nbytes: int) -> int | None:
        """Allocate a block and return its offset; None if no gap is large enough."""
        for index, (offset, gap) in enumerate(self.free):
            if gap >= nbytes:
                self.free[index : index + 1] = [(offset + nbytes, gap - nbytes)] if gap > nbytes else []
                return offset
        return None

    def put(self, offset: int, nbytes: int) -> None:
        """Free a block; only records it, since garbage collection can call this in any thread."""
        if os.getpid() != self._owner:
            return  # a forked child (a loader's worker) frees its copy of a tensor that the parent still uses
        if nbytes >= _GIVE_BACK:
            self.memory.madvise(mmap.MADV_REMOVE, offset, nbytes)
        self._returned.append((offset, nbytes))

    def collect(self) -> None:
        """Merge the freed blocks with adjacent gaps."""
        while self._returned:
            offset, nbytes = self._returned.popleft()
            index = bisect(self.free, (offset, 0))
            before = self.free[index - 1] if index else (0, -1)
            if sum(before) == offset:
                index, offset, nbytes = index - 1, before[0], before[1] + nbytes
                del self.free[index]
            after = self.free[index] if index < len(self.free) else (-1, 0)
            if offset + nbytes == after[0]:
                nbytes += after[1]
                del self.free[index]
            self.free.insert(index, (offset, nbytes))


class SharedAllocator:
    """Thread-safe allocator of tensors in shared memory; memory is reused once its last tensor is freed."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []  # append-only
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._busy = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a 1-D uninitialized tensor; in a forked child, from the child's own memory."""
        wanted = numel * dtype.itemsize
        if wanted == 0 or os.getpid() != self._owner:
            return torch.empty(numel, dtype=dtype)
        nbytes = -(-wanted // _PAGE) * _PAGE
        region, offset = self._block(nbytes)
        array = np.frombuffer(region.memory, dtype=np.uint8, count=wanted, offset=offset)
        weakref.finalize(array, region.put, offset, nbytes).atexit = False
        return torch.from_numpy(array).view(dtype)

    def _block(self, nbytes: int) -> tuple[_Region, int]:
        with self._lock:
            # Garbage collection may run a destructor here that allocates memory itself: it gets a new region.
            if self._busy:
                return self._new_region(nbytes)
            self._busy = True
            try:
                for region in self.regions:
                    region.collect()
                    offset = region.take(nbytes)
                    if offset is not None:
                        return region, offset
                return self._new_region(nbytes)
            finally:
                self._busy = False

    def _new_region(self, nbytes: int) -> tuple[_Region, int]:
        region = _Region(max(nbytes, _REGION))
        offset = region.take(nbytes) or 0  # before others can see it
        self.regions.append(region)
        return region, offset

    def place(self, tensor: torch.Tensor) -> tuple[int, int, int] | None:
        """Return (descriptor, bytes of the memory file, offset) of a contiguous tensor; None if allocated elsewhere."""
        address = tensor.data_ptr()
        for region in self.regions:
            if region.base <= address < region.base + region.nbytes:
                return region.descriptor, region.nbytes, address - region.base
        return None
