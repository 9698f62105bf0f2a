"""Block I/O with Python threads, for machines without the native library."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque

import torch

from deepspeed.ops.aio.files import ALIGNMENT, BlockFile


class ThreadJob:
    """Transfer of one tensor in the queue of Python threads."""

    def __init__(self, file: BlockFile, tensor: torch.Tensor, offset: int, writing: bool) -> None:
        self.file, self.offset, self.writing = file, offset, writing
        self.memory = tensor.detach().view(-1).view(torch.uint8).numpy().data
        self.aligned = tensor.data_ptr() % ALIGNMENT == 0
        self.claimed = 0
        self.running = 0
        self.moved = 0
        self.error = 0
        self.over = threading.Event()

    def wait(self) -> tuple[int, int]:
        self.over.wait()
        return self.error, self.moved

    def done(self) -> bool:
        return self.over.is_set()

    def move(self, start: int, stop: int, aligned_block: _AlignedBlock) -> tuple[int, int]:
        """Move bytes [start, stop), by `aligned_block` if unaligned; return (bytes, errno); 0: all, or file end."""
        call = os.pwritev if self.writing else os.preadv
        position, refused = start, self.file.direct < 0
        while position < stop:
            # Bytes that direct I/O does not accept, also after a short count, go through the page cache or fail there.
            direct = not refused and (self.offset + position) % ALIGNMENT == 0 and stop - position >= ALIGNMENT
            end = stop - (stop - position) % ALIGNMENT if direct else stop
            memory = self.memory[position:end]
            through = direct and not (self.aligned and position % ALIGNMENT == 0)
            used = aligned_block.view(end - position) if through else memory
            if through and self.writing:
                used[:] = memory
            try:
                count = call(self.file.direct if direct else self.file.plain, [used], self.offset + position)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    refused = True
                    continue
                return position - start, error.errno or -1
            if count == 0:
                break
            if through and not self.writing:
                memory[:count] = used[:count]
            position += count
        return position - start, 0


class ThreadQueue:
    """Queue with Python threads: transfers in order, `threads` blocks at a time.

    Args:
        threads: number of threads, and so of requests in flight.
        block: bytes per request, a multiple of `ALIGNMENT`.
    """

    def __init__(self, threads: int, block: int) -> None:
        self._block = block
        self._jobs: deque[ThreadJob] = deque()
        self._change = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._serve, daemon=True, name="deepspeed-io") for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, file: BlockFile, tensor: torch.Tensor, offset: int, writing: bool) -> ThreadJob:
        job = ThreadJob(file, tensor, offset, writing)
        with self._change:
            self._jobs.append(job)
            self._change.notify_all()
        return job

    def stop(self) -> None:
        with self._change:
            self._stopping = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        aligned_block = _AlignedBlock(self._block)
        while True:
            with self._change:
                while not self._jobs and not self._stopping:
                    self._change.wait()
                if not self._jobs:
                    return
                job = self._jobs[0]
                start = job.claimed
                stop = job.claimed = min(start + self._block, len(job.memory))
                job.running += 1
                if stop == len(job.memory):
                    self._jobs.popleft()
            moved, error = job.move(start, stop, aligned_block)
            with self._change:
                job.running -= 1
                job.moved += moved
                job.error = job.error or error
                if moved < stop - start and job.claimed < len(job.memory):  # skip the remaining blocks
                    job.claimed = len(job.memory)
                    self._jobs.remove(job)
                if not job.running and job.claimed == len(job.memory):
                    job.over.set()


class _AlignedBlock:
    """Aligned buffer of one thread, for tensors that are not aligned for direct I/O; allocated on first use."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._pages: mmap.mmap | None = None

    def view(self, nbytes: int) -> memoryview:
        if self._pages is None:
            self._pages = mmap.mmap(-1, self._nbytes)
        return memoryview(self._pages)[:nbytes]
