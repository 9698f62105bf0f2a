"""Asynchronous copies between host memory and a device, on a separate stream.

If the accelerator is the CPU, its streams and events do nothing, and the copies are synchronous.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.spans import COPY, recorder
from deepspeed.storage.buffer_pool import BufferPool


class PendingCopy:
    """Asynchronous copy in progress, as returned by `AsyncCopier.copy`."""

    def __init__(self, mover: AsyncCopier, event: object, source: torch.Tensor) -> None:
        self._mover = mover
        self._event, self._source = event, source  # keeps the source alive until the copy has finished

    def wait(self) -> None:
        """Block the host until the copy has finished."""
        with recorder.span(COPY, "wait for a copy between host and device"):
            self._event.synchronize()  # type: ignore[attr-defined]

    def done(self) -> bool:
        """Return whether the copy has finished; does not block."""
        return self._event.query()  # type: ignore[attr-defined]

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that makes the copy stream current: work started inside runs after the copy."""
        return self._mover.stream()

    def before_current(self) -> None:
        """Make the current stream wait for the copy; the host does not wait."""
        self._event.wait()  # type: ignore[attr-defined]


class AsyncCopier:
    """Copy stream of one device; its copies run in submission order.

    Args:
        device: device of the stream; must have an index if there are several devices of its type.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = get_accelerator()
        self._device = device
        elsewhere = self._accelerator.on_accelerator(torch.empty(0, device=device)) and device.type != "cpu"
        self._stream = self._accelerator.Stream(device=device) if elsewhere else self._accelerator.Stream()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        """Start an asynchronous copy, ordered after all earlier work of the current stream.

        Args:
            target: host or device tensor; must not be read until the copy has finished.
            source: tensor to copy, of the shape and dtype of `target`; must not change until the copy has finished.
        """
        self._stream.wait_stream(self._accelerator.current_stream(self._device))
        with self._accelerator.stream(self._stream), recorder.span(COPY, "copy between host and device"):
            target.copy_(source, non_blocking=True)
            event = self._accelerator.Event()
            event.record()
        return PendingCopy(self, event, source)

    def stream(self) -> AbstractContextManager[object]:
        """Return a context that makes the copy stream the current stream."""
        return self._accelerator.stream(self._stream)

    def deliver(self, target: torch.Tensor, source: torch.Tensor, pool: BufferPool) -> None:
        """Round a host tensor to the dtype of a device tensor and copy it there, without waiting for the copy.

        Args:
            target: device tensor; later work on the current stream reads the new values.
            source: host tensor of the same shape and any dtype; may change once this call returns.
            pool: pool from which a host staging buffer is borrowed.
        """
        buffer = pool.take(target.nbytes)
        staged = buffer.view(target.dtype)
        staged.copy_(source)
        arrival = self.copy(target, staged)
        arrival.before_current()
        pool.put(buffer, after=arrival)


def mover_of(device: torch.device) -> AsyncCopier:
    """Return the only copier of a device (if it has no index: of the current device of its type)."""
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, get_accelerator().current_device())
    return _mover(device)


@cache
def _mover(device: torch.device) -> AsyncCopier:
    return AsyncCopier(device)
