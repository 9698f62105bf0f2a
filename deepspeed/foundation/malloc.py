"""Return of freed memory to the operating system.

glibc maps large blocks separately and unmaps them when they are freed. But the first free raises the threshold for
large blocks to the size of the freed block, up to 32 MiB. From then on, blocks of this size are in the heap, and freed
memory stays with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import resource
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import numpy as np
import torch

_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of mallopt
LARGE, IN_HEAP = 1 << 20, 1 << 25  # bytes that count as large inside, and, as glibc itself would have it, outside
PAGE, HUGE_PAGE = 4096, 2 << 20  # bytes
_HUGE = 14  # MADV_HUGEPAGE of Linux
_lock, _open = threading.Lock(), list[object]()


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's `mallopt`; None without it, or if the user has set the threshold for large blocks."""
    user_set = os.environ.get("MALLOC_MMAP_THRESHOLD_") or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    return None if user_set else mallopt


def limits_addresses() -> bool:
    """Return whether this process's address space is limited (`ulimit -v`); then free heap memory counts as used."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def resident(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the resident bytes of tensors in host memory, each storage once.

    Allocated but unwritten pages are not resident. If the system has no such information, all bytes count.
    """
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors if t is not None)}
    return sum(_resident(address, nbytes) for address, nbytes in storages.items() if nbytes)


def _resident(address: int, nbytes: int) -> int:
    first = address // PAGE * PAGE
    pages = np.zeros(-(-(address + nbytes - first) // PAGE), dtype=np.uint8)
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    where = [ctypes.c_void_p(first), ctypes.c_size_t(pages.size * PAGE), ctypes.c_void_p(pages.ctypes.data)]
    if mincore is None or mincore(*where) != 0:
        return nbytes
    return min(nbytes, PAGE * int(np.count_nonzero(pages & 1)))


def heap() -> range:
    """Return the address range of the heap, empty if unknown; the system reclaims freed memory only from the end."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            if line.endswith("[heap]\n"):
                return range(*(int(part, 16) for part in line.split(" ", 1)[0].split("-")))
    return range(0)


@contextmanager
def own_pages() -> Generator[None, None, None]:
    """Context in which blocks of 1 MiB and more are allocated outside of the heap, so that freeing unmaps them.

    All threads are affected. A threshold of the user stays. Blocks that fit into a gap of the heap still go there.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    with _lock:
        _open.append(mallopt)
        mallopt(_MAP, LARGE)
    try:
        yield
    finally:
        with _lock:
            _open.pop()
            if not _open:
                mallopt(_MAP, IN_HEAP)
                mallopt(_TRIM, 2 * IN_HEAP)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


def huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for new memory, since a page fault for each 4 KiB takes longer than a read from a disk.

    Errors of the system are ignored. Blocks with less than 1 MiB of whole pages are left unchanged.
    """
    madvise = _madvise()
    begin, end = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if madvise is not None and address and end - begin >= LARGE:
        madvise(begin, end - begin, _HUGE)


def mapped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of a shape with at least one element in separately mapped host memory; it cannot be resized."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def at_a_page(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros (numel,) in host memory that is aligned to a page, so that direct I/O can read into them.

    Large tensors remain aligned after their storage was resized to nothing and back inside `own_pages`, unless the
    heap has a free gap of their size by then.
    """
    with own_pages():
        memory = torch.zeros(numel + PAGE // dtype.itemsize, dtype=dtype)
    lead = -memory.data_ptr() % PAGE // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), lead, (numel,), (1,))


def in_huge_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros (numel,) for a long time, in huge pages if they are large: each step of training reads them."""
    if numel * dtype.itemsize < HUGE_PAGE:
        return torch.zeros(numel, dtype=dtype)
    with own_pages():
        memory = torch.empty(numel, dtype=dtype)  # without pages until it is written
    huge_pages(memory.data_ptr(), memory.nbytes)
    return memory.zero_()
