"""The queue of block requests behind the NVMe tier and the public aio handle: native where it is built."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from deepspeed.native import library
from deepspeed.ops.aio.files import ALIGNMENT, BlockFile
from deepspeed.ops.aio.native import NativeQueue
from deepspeed.ops.aio.threads import ThreadQueue

LEAST_IN_FLIGHT, MOST_IN_FLIGHT = 4, 64  # fewer starve a disk; each request in flight is a thread of the host


class IORequest(Protocol):
    """One tensor on its way."""

    def wait(self) -> tuple[int, int]:
        """Block until it is over; returns (errno or 0, bytes moved)."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class BlockQueue(Protocol):
    """Moves tensors to and from files, several blocks at a time, jobs in the order of their submission."""

    def submit(self, file: BlockFile, tensor: torch.Tensor, offset: int, writing: bool) -> IORequest:
        """Start moving a contiguous CPU tensor; the job keeps the tensor alive."""
        ...

    def stop(self) -> None:
        """End the threads once every job is over."""
        ...


def block_queue(block_size: int, queue_depth: int, threads: int) -> BlockQueue:
    """A queue with `queue_depth` x `threads` requests in flight, kept between 4 and 64.

    Args:
        block_size: bytes per request (`aio.block_size`), rounded up to `ALIGNMENT`.
        queue_depth: `aio.queue_depth`.
        threads: `aio.intra_op_parallelism`.
    """
    block = -(-block_size // ALIGNMENT) * ALIGNMENT
    in_flight = min(max(queue_depth * threads, LEAST_IN_FLIGHT), MOST_IN_FLIGHT)
    native = library()
    return ThreadQueue(in_flight, block) if native is None else NativeQueue(native, in_flight, block)


def cause_of(error: int, moved: int, wanted: int) -> str:
    """Why a job did not move what it should, in words; empty when it did."""
    if error:
        return os.strerror(error)
    return "the file ended" if moved < wanted else ""
