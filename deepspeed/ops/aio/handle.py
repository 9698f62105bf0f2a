"""The public handle for users who move tensors to and from files themselves."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

import torch

from deepspeed.errors import ArgumentError, StorageError
from deepspeed.ops.aio.files import BlockFile
from deepspeed.ops.aio.memory import aligned_bytes
from deepspeed.ops.aio.queue import IORequest, block_queue, cause_of


class aio_handle:
    """Reads and writes CPU tensors, `queue_depth` x `intra_op_parallelism` requests at a time.

    Tensors of `new_cpu_locked_tensor` bypass the page cache if the file system supports it; any other contiguous CPU
    tensor works too. A write creates a missing file and never truncates one.

    Example:
        handle = aio_handle()
        buffer = handle.new_cpu_locked_tensor(1024, torch.empty(0, dtype=torch.bfloat16))
        handle.async_pwrite(buffer, "weights.bin")
        handle.wait()

    Args:
        block_size: bytes per request.
        queue_depth: requests in flight per thread.
        single_submit: accepted; every request is submitted by itself.
        overlap_events: accepted; submitting never waits.
        intra_op_parallelism: threads of a transfer.
    """

    def __init__(
        self,
        block_size: int = 1024**2,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if min(block_size, queue_depth, intra_op_parallelism) < 1:
            raise ArgumentError(
                f"aio_handle(block_size={block_size}, queue_depth={queue_depth}, "
                f"intra_op_parallelism={intra_op_parallelism}): each must be at least 1"
            )
        self._options = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._queue = block_queue(block_size, queue_depth, intra_op_parallelism)
        self._stop = weakref.finalize(self, self._queue.stop)
        self._started: list[_Started] = []

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Read; returns 1 when the bytes are there.

        Args:
            buffer: a contiguous CPU tensor, filled whole.
            filename: the file.
            validate: compare the bytes with the file's afterwards.
            file_offset: byte of the file at which to begin.

        Raises:
            StorageError: the file is not there or too short, or the disk failed.
        """
        return self._finish(self._start(buffer, filename, file_offset, False, validate))

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write; returns 1 when the bytes are in the file. Arguments and errors are those of `read`."""
        return self._finish(self._start(buffer, filename, file_offset, True, validate))

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """`read`, or with `async_op` the start of it: returns 0, and `wait` finishes."""
        started = self._start(buffer, filename, file_offset, False, validate)
        return self._later(started) if async_op else self._finish(started)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """`write`, or with `async_op` the start of it: returns 0, and `wait` finishes."""
        started = self._start(buffer, filename, file_offset, True, validate)
        return self._later(started) if async_op else self._finish(started)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """`read` without validation."""
        return self.read(buffer, filename, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """`write` without validation."""
        return self.write(buffer, filename, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start a read; returns 0. The buffer must be left alone until `wait`."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start a write; returns 0. The buffer must not change until `wait`."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def wait(self) -> int:
        """Finish everything that was started; returns how many operations that were.

        Raises:
            StorageError: one failed; the first is reported, and all have ended.
        """
        started, self._started = self._started, []
        failures: list[StorageError] = []
        for operation in started:
            try:
                self._finish(operation)
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return len(started)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D zeroed tensor of the example's dtype, aligned for direct I/O; pinned where there is a device."""
        nbytes = num_elem * example_tensor.element_size()
        return aligned_bytes(max(nbytes, 1), pin=True)[:nbytes].view(example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free a tensor's memory before the tensor itself is freed; it is empty afterwards."""
        tensor.data = torch.empty(0, dtype=tensor.dtype)
        return True

    def get_block_size(self) -> int:
        """Bytes per request."""
        return self._options[0]

    def get_queue_depth(self) -> int:
        """Requests in flight per thread."""
        return self._options[1]

    def get_single_submit(self) -> bool:
        """As given."""
        return self._options[2]

    def get_overlap_events(self) -> bool:
        """As given."""
        return self._options[3]

    def get_intra_op_parallelism(self) -> int:
        """Threads of a transfer."""
        return self._options[4]

    def _start(self, buffer: torch.Tensor, filename: str, offset: int, writing: bool, validate: bool) -> _Started:
        verb = "writing" if writing else "reading"
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ArgumentError(
                f"{verb} '{filename}' takes a contiguous CPU tensor, not shape {tuple(buffer.shape)} with strides "
                f"{buffer.stride()} on {buffer.device}"
            )
        try:
            file = BlockFile.open(os.fspath(filename), os.O_WRONLY | os.O_CREAT if writing else os.O_RDONLY)
        except OSError as error:
            raise StorageError(f"{verb} '{filename}': it cannot be opened: {error.strerror}") from error
        return _Started(file, buffer, offset, verb, validate, self._queue.submit(file, buffer, offset, writing))

    def _later(self, started: _Started) -> int:
        self._started.append(started)
        return 0

    def _finish(self, started: _Started) -> int:
        started.finish()
        return 1


@dataclass
class _Started:
    """One operation under way."""

    file: BlockFile
    buffer: torch.Tensor
    offset: int
    verb: str
    validate: bool
    job: IORequest

    def finish(self) -> None:
        """Wait for it, check it, close the file."""
        error, moved = self.job.wait()
        cause = cause_of(error, moved, self.buffer.nbytes)
        if not cause and self.validate and not self._same():
            cause = "the file holds other bytes than the tensor"
        state = self.file.disk_state()
        self.file.close()
        if cause:
            what = f"{self.verb} {self.buffer.nbytes} bytes at {self.offset} of '{self.file.name}'"
            raise StorageError(f"{what} stopped after {moved} bytes: {cause}. {state}")

    def _same(self) -> bool:
        end = self.offset + self.buffer.nbytes
        there = torch.from_file(self.file.name, shared=False, size=end, dtype=torch.uint8)[self.offset :]
        return torch.equal(there, self.buffer.detach().view(-1).view(torch.uint8))
