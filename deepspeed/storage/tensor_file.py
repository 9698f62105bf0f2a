"""File of offloaded tensors: one unnamed file per rank, with one extent per tensor."""

from __future__ import annotations

import os
import time
import weakref
from enum import Enum

import torch

from deepspeed.config.sections.memory import Aio
from deepspeed.errors import StorageError, UsageError
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.spans import DISK, TRANSFER, now, recorder
from deepspeed.ops.aio.files import ALIGNMENT, BlockFile, size_text
from deepspeed.ops.aio.memory import aligned_bytes
from deepspeed.ops.aio.queue import BlockQueue, IORequest, block_queue, cause_of

_TRIAL = 64 * 1024**2  # maximum bytes of a disk measurement: 8 rounds of the default requests in flight
_TRIAL_BUFFER = 16 * 1024**2  # memory of a disk measurement


class _State(Enum):
    """State of an extent's contents; only `DATA` can be read."""

    NOTHING = "nothing was written yet"
    MOVING = "a transfer of it was not waited for"
    DATA = "data"
    HALF = "the last write of it failed"


class Extent:
    """Byte range of one tensor in the file.

    Args:
        label: name of the tensor in error messages.
        nbytes: size in bytes.
        offset: position of the first byte in the file, a multiple of `ALIGNMENT`.
    """

    def __init__(self, label: str, nbytes: int, offset: int) -> None:
        self.label = label
        self.nbytes = nbytes
        self.offset = offset
        self.state = _State.NOTHING


class Transfer:
    """Read or write in progress, as returned by `Disk.read` and `Disk.write`.

    Until `wait` has returned, the tensor must not be changed (after `read`: not used), nor the extent transferred.
    """

    def __init__(self, disk: Disk, extent: Extent, job: IORequest, writing: bool) -> None:
        self._disk, self._extent, self._writing = disk, extent, writing
        self._began = now()
        self._job: IORequest | None = job

    def done(self) -> bool:
        """Return whether `wait` would return immediately."""
        return self._job is None or self._job.done()

    def wait(self) -> None:
        """Block until the transfer has finished; repeated calls do nothing.

        Raises:
            StorageError: the transfer failed. After a failed write, the extent cannot be read until it is rewritten.
        """
        if self._job is None:
            return
        label = f"{'write' if self._writing else 'read'} of {self._extent.label}"
        with recorder.span(DISK, label, self._extent.label):
            error, moved = self._job.wait()
        recorder.add(self._began, TRANSFER, label, self._extent.label, moved)
        self._job = None
        cause = cause_of(error, moved, self._extent.nbytes) or self._disk.cut()
        self._extent.state = _State.HALF if cause and self._writing else _State.DATA
        if cause:
            verb = "writing" if self._writing else "reading"
            raise self._disk.failure(verb, self._extent, f"stopped after {moved} bytes: {cause}")


class Disk:
    """File on a local disk with the offloaded tensors of one rank.

    The file has no name: the operating system frees it when the process ends, even after a crash, and it survives the
    removal of its folder. Space is reserved by `create`, so writes cannot fail later because the disk is full.

    Args:
        folder: folder on a local disk (`nvme_path`); created if missing.
        settings: block size, queue depth and number of I/O threads (section `aio` of the configuration).

    Raises:
        StorageError: the folder cannot be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, settings: Aio) -> None:
        self.folder = os.fspath(folder)
        try:
            os.makedirs(self.folder, exist_ok=True)
            self._file = BlockFile.unnamed(self.folder)
        except OSError as error:
            raise StorageError(
                f"cannot make a file in nvme_path '{self.folder}': {error.strerror}. "
                "Name a folder on a local disk in which this user may write"
            ) from error
        self._queue = block_queue(settings.block_size, settings.queue_depth, settings.intra_op_parallelism)
        self._end = 0
        self._close = weakref.finalize(self, _close, self._queue, self._file, os.getpid())

    @property
    def nbytes(self) -> int:
        """Return the number of bytes reserved so far."""
        return self._end

    def create(self, label: str, nbytes: int) -> Extent:
        """Reserve disk space for a tensor.

        Args:
            label: name of the tensor for error messages.
            nbytes: size in bytes; rounded up to a multiple of `ALIGNMENT` on the disk.

        Returns:
            Extent that must be written before it can be read.

        Raises:
            StorageError: the disk is full, or another process has truncated the file.
        """
        extent = Extent(label, nbytes, self._end)
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        cause = self.cut()
        if cause:
            raise self.failure("making room for", extent, f"failed: {cause}")
        try:
            os.posix_fallocate(self._file.plain, self._end, size)
        except OSError as error:
            raise self.failure("making room for", extent, f"failed: {error.strerror}") from error
        self._end += size
        return extent

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Start an asynchronous write.

        Args:
            extent: extent to write.
            source: contiguous CPU tensor of the extent's size; must not change until `Transfer.wait` returns.

        Raises:
            UsageError: the tensor is unsuitable, the disk is closed, or another transfer was not waited for.
            StorageError: another process has truncated the file.
        """
        return self._start(extent, source, True)

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        """Start an asynchronous read.

        Args:
            extent: extent to read.
            into: contiguous CPU tensor of the extent's size; must not be used until `Transfer.wait` returns.

        Raises:
            UsageError: as in `write`, or nothing was written to the extent yet.
            StorageError: another process has truncated the file, or the last write of the extent failed.
        """
        return self._start(extent, into, False)

    def preflight(self, need_bytes: int) -> float:
        """Check the free disk space, measure the disk's throughput, and log the expected time per training step.

        Args:
            need_bytes: number of bytes that this rank will store, including those already reserved.

        Returns:
            Measured throughput in MB/s (1e6 bytes per second): the harmonic mean of writing and reading.

        Raises:
            StorageError: less than `need_bytes` are free or reserved, or a transfer of the measurement failed.
        """
        free = self._file.free()
        if free + self._end < need_bytes:
            raise StorageError(
                f"nvme_path '{self.folder}' has {size_text(free)} free, and this rank's state needs "
                f"{size_text(need_bytes)}. Free some, name another folder, or keep the state on the host (device: cpu)"
            )
        write, read = self._measure(min(_TRIAL, max(free // 4, 1)))
        seconds = need_bytes / write + need_bytes / read
        way = "direct" if self._file.direct >= 0 else "through the page cache"
        log_rank0(
            f"nvme_path '{self.folder}': {size_text(need_bytes)} of {size_text(free)} free, {way}; "
            f"write {write / 1e6:,.0f} MB/s, read {read / 1e6:,.0f} MB/s: a step that moves all of it both ways "
            f"takes {seconds:.2f} s for that"
        )
        return 2 / (1 / write + 1 / read) / 1e6

    def close(self) -> None:
        """Wait for transfers in progress and free the disk space; repeated calls do nothing."""
        self._close()

    def failure(self, verb: str, extent: Extent, cause: str) -> StorageError:
        """Build an error whose message contains the tensor, the file and the free disk space.

        Args:
            verb: failed operation, such as "writing".
            extent: extent of the tensor.
            cause: end of the sentence, such as "failed: No space left on device".
        """
        return StorageError(
            f"{verb} '{extent.label}' ({extent.nbytes} bytes at {extent.offset} of {self._file.name}) {cause}. "
            f"{self._file.disk_state()}. See to the disk, then start again from the last checkpoint"
        )

    def cut(self) -> str:
        """Return a message if another process has truncated the file, else ""."""
        size = self._file.size()
        return "" if size >= self._end else f"somebody truncated the file to {size} bytes of {self._end}"

    def _start(self, extent: Extent, tensor: torch.Tensor, writing: bool) -> Transfer:
        """Check the state of disk, extent and tensor, and start a transfer."""
        verb = "writing" if writing else "reading"
        if not self._close.alive:
            raise UsageError(f"{verb} '{extent.label}': this disk was closed")
        if tensor.nbytes != extent.nbytes or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise UsageError(
                f"{verb} '{extent.label}' takes a contiguous CPU tensor of {extent.nbytes} bytes, "
                f"not {tensor.nbytes} bytes on {tensor.device}"
            )
        if extent.state is _State.MOVING or (extent.state is _State.NOTHING and not writing):
            raise UsageError(f"{verb} '{extent.label}' cannot begin: {extent.state.value}")
        cause = self.cut() or (extent.state.value if extent.state is _State.HALF and not writing else "")
        if cause:
            raise self.failure(verb, extent, f"cannot begin: {cause}")
        with recorder.span(DISK, f"start of {verb} {extent.label}", extent.label):
            job = self._queue.submit(self._file, tensor, extent.offset, writing)
        extent.state = _State.MOVING
        return Transfer(self, extent, job, writing)

    def _measure(self, nbytes: int) -> tuple[float, float]:
        """Measure the throughput of writes and of reads, in bytes per second, with temporary extents."""
        each = min(nbytes, _TRIAL_BUFFER)
        trials = [self.create("a trial of the disk", each) for _ in range(-(-nbytes // each))]
        buffer = aligned_bytes(each)  # one buffer for all: the values do not matter
        speeds = []
        for start in (self.write, self.write, self.read):  # the first write allocates the blocks and does not count
            begin = time.perf_counter()
            for transfer in [start(trial, buffer) for trial in trials]:
                transfer.wait()
            speeds.append(len(trials) * each / (time.perf_counter() - begin))
        self._end = trials[0].offset
        os.ftruncate(self._file.plain, self._end)
        return speeds[1], speeds[2]


disks: Replaceable[type[Disk]] = Replaceable(Disk)
"""Class that opens a disk; a simulation replaces it by `SimulatedDisk`."""


def _close(queue: BlockQueue, file: BlockFile, owner: int) -> None:
    """Stop the queue and close the file, but not in a forked child, which does not have the queue's threads."""
    if os.getpid() == owner:
        queue.stop()
        file.close()
