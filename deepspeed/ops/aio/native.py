"""Block I/O by the threads of the native library, which need no interpreter between two blocks."""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import POINTER, c_int, c_int64, c_void_p

import torch

from deepspeed.errors import StorageError
from deepspeed.ops.aio.files import BlockFile


class NativeJob:
    """One tensor on its way to or from a file."""

    def __init__(self, queue: NativeQueue, tensor: torch.Tensor, handle: int) -> None:
        self._queue, self._handle = queue, handle
        self._tensor: torch.Tensor | None = tensor
        self._lock = threading.Lock()
        self._moved = c_int64()
        self._error = 0

    def wait(self) -> tuple[int, int]:
        """Block until it is over; returns (errno or 0, bytes moved)."""
        with self._lock:
            if self._tensor is not None:
                self._error = self._queue.finish(self._handle, self._moved)
                self._tensor = None
                self._queue.unfinished.discard(self)
        return self._error, self._moved.value

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._tensor is None or self._queue.is_over(self._handle)


class NativeQueue:
    """Serves jobs in order, `threads` blocks at a time; the arguments are those of `ThreadQueue`.

    Attributes:
        unfinished: jobs nobody waited for yet. Held here, so that the memory of a forgotten job outlives its transfer.

    Raises:
        StorageError: the system gives no more threads.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, block: int) -> None:
        self._library = _declared(library)
        self._handle = self._library.ds_io_start(threads, block)
        if not self._handle:
            raise StorageError("no thread could be started for block I/O; raise this user's limit on them (ulimit -u)")
        self.unfinished: set[NativeJob] = set()

    def submit(self, file: BlockFile, tensor: torch.Tensor, offset: int, writing: bool) -> NativeJob:
        """Start moving a contiguous CPU tensor."""
        where = (file.direct, file.plain, tensor.data_ptr(), offset, tensor.nbytes, writing)
        job = NativeJob(self, tensor, self._library.ds_io_submit(self._handle, *where))
        self.unfinished.add(job)
        return job

    def finish(self, job: int, moved: c_int64) -> int:
        """Wait for a job and forget it."""
        return self._library.ds_io_wait(self._handle, job, ctypes.byref(moved))

    def is_over(self, job: int) -> bool:
        """Whether every block of a job has moved or failed."""
        return bool(self._library.ds_io_done(self._handle, job))

    def stop(self) -> None:
        """End the threads once every job is over."""
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
