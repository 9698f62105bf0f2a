"""Queue of block requests for the NVMe tier and the public aio handle.

The threads of the native library run without Python's interpreter; without the library, Python threads are used.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from ctypes import POINTER, c_int, c_int64, c_void_p
from typing import Protocol

import torch

from deepspeed.errors import StorageError
from deepspeed.native import library
from deepspeed.ops.aio.files import ALIGNMENT, BlockFile
from deepspeed.ops.aio.threads import ThreadQueue

LEAST_IN_FLIGHT, MOST_IN_FLIGHT = 4, 64  # fewer do not saturate a disk; each request in flight needs a thread


class IORequest(Protocol):
    """Interface of a transfer of one tensor from or to a file."""

    def wait(self) -> tuple[int, int]:
        """Block until the transfer has ended; return (errno or 0, bytes moved)."""
        ...

    def done(self) -> bool:
        """Return whether the transfer has ended."""
        ...


class BlockQueue(Protocol):
    """Interface of a queue of transfers between tensors and files: several blocks at a time, in order of submission."""

    def submit(self, file: BlockFile, tensor: torch.Tensor, offset: int, writing: bool) -> IORequest:
        """Start the transfer of a contiguous CPU tensor, not to be used until it ends; `offset` is in bytes."""
        ...

    def stop(self) -> None:
        """End the threads after all transfers."""
        ...


def block_queue(block_size: int, queue_depth: int, threads: int) -> BlockQueue:
    """Create a queue with `queue_depth` x `threads` requests in flight, at least 4 and at most 64.

    Args:
        block_size: bytes per request (`aio.block_size`), rounded up to a multiple of `ALIGNMENT`.
        queue_depth: requests in flight per thread (`aio.queue_depth`).
        threads: number of threads per transfer (`aio.intra_op_parallelism`).
    """
    block = -(-block_size // ALIGNMENT) * ALIGNMENT
    in_flight = min(max(queue_depth * threads, LEAST_IN_FLIGHT), MOST_IN_FLIGHT)
    native = library()
    return ThreadQueue(in_flight, block) if native is None else NativeQueue(native, in_flight, block)


def cause_of(error: int, moved: int, wanted: int) -> str:
    """Describe why a transfer was incomplete, from the result of `wait` and the bytes wanted; "" if it was complete."""
    if error:
        return os.strerror(error)
    return "the file ended" if moved < wanted else ""


class NativeJob:
    """Transfer of one tensor in the native queue."""

    def __init__(self, queue: NativeQueue, tensor: torch.Tensor, handle: int) -> None:
        self._queue, self._handle = queue, handle
        self._tensor: torch.Tensor | None = tensor
        self._lock = threading.Lock()
        self._moved = c_int64()
        self._error = 0

    def wait(self) -> tuple[int, int]:
        with self._lock:
            if self._tensor is not None:
                self._error = self._queue.finish(self._handle, self._moved)
                self._tensor = None
                self._queue.unfinished.discard(self)
        return self._error, self._moved.value

    def done(self) -> bool:
        return self._tensor is None or self._queue.is_over(self._handle)


class NativeQueue:
    """Queue with native threads of `library`: transfers in order, `threads` blocks of `block` bytes at a time.

    Attributes:
        unfinished: transfers without a finished `wait`, referenced to keep their tensors alive.

    Raises:
        StorageError: the system cannot start a thread.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, block: int) -> None:
        self._library = _declared(library)
        self._handle = self._library.ds_io_start(threads, block)
        if not self._handle:
            raise StorageError("no thread could be started for block I/O; raise this user's limit on them (ulimit -u)")
        self.unfinished: set[NativeJob] = set()

    def submit(self, file: BlockFile, tensor: torch.Tensor, offset: int, writing: bool) -> NativeJob:
        where = (file.direct, file.plain, tensor.data_ptr(), offset, tensor.nbytes, writing)
        job = NativeJob(self, tensor, self._library.ds_io_submit(self._handle, *where))
        self.unfinished.add(job)
        return job

    def finish(self, job: int, moved: c_int64) -> int:
        """Wait for a transfer, set `moved` to its bytes, and return its errno or 0."""
        return self._library.ds_io_wait(self._handle, job, ctypes.byref(moved))

    def is_over(self, job: int) -> bool:
        """Return whether every block of a transfer has moved or failed."""
        return bool(self._library.ds_io_done(self._handle, job))

    def stop(self) -> None:
        for job in list(self.unfinished):
            job.wait()
        self._library.ds_io_stop(self._handle)


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    signatures = {
        "ds_io_start": (c_void_p, [c_int, c_int64]),
        "ds_io_submit": (c_void_p, [c_void_p, c_int, c_int, c_void_p, c_int64, c_int64, c_int]),
        "ds_io_done": (c_int, [c_void_p, c_void_p]),
        "ds_io_wait": (c_int, [c_void_p, c_void_p, POINTER(c_int64)]),
        "ds_io_stop": (None, [c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
