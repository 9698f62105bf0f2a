"""Public handle for reading and writing tensors in files."""

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
    """Handle that reads and writes CPU tensors in files, with several requests in flight.

    The number of requests is `queue_depth` x `intra_op_parallelism`, but from 4 to 64. Tensors of
    `new_cpu_locked_tensor` bypass the page cache if the file system supports it; any other contiguous CPU tensor works
    too. A write creates a missing file and never truncates one.

    Example:
        handle = aio_handle()
        buffer = handle.new_cpu_locked_tensor(1024, torch.empty(0, dtype=torch.bfloat16))
        handle.async_pwrite(buffer, "weights.bin")
        handle.wait()

    Args:
        block_size: bytes per request.
        queue_depth: requests in flight per thread.
        single_submit: no effect; every request is submitted by itself.
        overlap_events: no effect; submitting never waits.
        intra_op_parallelism: number of threads per transfer.

    Raises:
        ArgumentError: a number is below 1.
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
        """Read a tensor from a file; return 1 after all bytes have arrived.

        Args:
            buffer: a contiguous CPU tensor, filled completely.
            filename: path of the file.
            validate: whether the tensor is compared with the file afterwards.
            file_offset: offset in the file in bytes.

        Raises:
            ArgumentError: the buffer is not on the CPU or not contiguous.
            StorageError: the file is missing or too short, the disk has failed, or the comparison finds a difference.
        """
        return self._finish(self._start(buffer, filename, file_offset, False, validate))

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write a tensor; return 1 after all bytes are in the file. Arguments and errors are those of `read`."""
        return self._finish(self._start(buffer, filename, file_offset, True, validate))

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool = False,
        async_op: bool = False,
        file_offset: int = 0,
    ) -> int:
        """Call `read`; with `async_op`, start the transfer and return 0; `wait` then raises the transfer's errors."""
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
        """Call `write`; with `async_op`, start the transfer and return 0; `wait` then raises the transfer's errors."""
        started = self._start(buffer, filename, file_offset, True, validate)
        return self._later(started) if async_op else self._finish(started)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Call `read` without validation."""
        return self.read(buffer, filename, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Call `write` without validation."""
        return self.write(buffer, filename, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start a read and return 0. The buffer must not be used until `wait`."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start a write and return 0. The buffer must not change until `wait`."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def wait(self) -> int:
        """Wait for all started operations and return their number.

        Raises:
            StorageError: an operation failed; the first error is reported, after all operations have ended.
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
        """Return zeros (num_elem,) of the example's dtype, aligned for direct I/O, and pinned if there is a device."""
        nbytes = num_elem * example_tensor.element_size()
        return aligned_bytes(max(nbytes, 1), pin=True)[:nbytes].view(example_tensor.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free the memory of a tensor now, and return True; the tensor is empty afterwards."""
        tensor.data = torch.empty(0, dtype=tensor.dtype)
        return True

    def get_block_size(self) -> int:
        """Return the bytes per request."""
        return self._options[0]

    def get_queue_depth(self) -> int:
        """Return the number of requests in flight per thread."""
        return self._options[1]

    def get_single_submit(self) -> bool:
        """Return the argument `single_submit`."""
        return self._options[2]

    def get_overlap_events(self) -> bool:
        """Return the argument `overlap_events`."""
        return self._options[3]

    def get_intra_op_parallelism(self) -> int:
        """Return the number of threads per transfer."""
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
    """Read or write in progress."""

    file: BlockFile
    buffer: torch.Tensor
    offset: int
    verb: str
    validate: bool
    job: IORequest

    def finish(self) -> None:
        """Wait for the operation, check its result, and close the file; StorageError if the operation failed."""
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
