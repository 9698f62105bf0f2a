"""Copies between host memory and a device, on a separate stream.

On the CPU, streams and events of the accelerator do nothing, and the same code makes plain copies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.spans import COPY, recorder
from deepspeed.storage.buffer_pool import BufferPool


class PendingCopy:
    """Copy in progress."""

    def __init__(self, mover: AsyncCopier, event: object, source: torch.Tensor) -> None:
        self._mover = mover
        self._event, self._source = event, source  # keeps the source alive until the copy has finished

    def wait(self) -> None:
        """Block the host until the copy has finished."""
        with recorder.span(COPY, "wait for a copy between host and device"):
            self._event.synchronize()  # type: ignore[attr-defined]

    def done(self) -> bool:
        return self._event.query()  # type: ignore[attr-defined]

    def stream(self) -> AbstractContextManager[object]:
        """Context with the copy stream as current stream: work started there runs after the copy."""
        return self._mover.stream()

    def before_current(self) -> None:
        """Make the current stream wait for the copy; the host does not wait."""
        self._event.wait()  # type: ignore[attr-defined]


class AsyncCopier:
    """Copies for one device, in submission order.

    Args:
        device: with an index if there are several devices of its type.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = get_accelerator()
        self._device = device
        elsewhere = self._accelerator.on_accelerator(torch.empty(0, device=device)) and device.type != "cpu"
        self._stream = self._accelerator.Stream(device=device) if elsewhere else self._accelerator.Stream()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        """Start a copy, after all earlier work of the current stream.

        Args:
            target: host or device tensor; must not be read until the copy has finished.
            source: tensor on the other side, of the same dtype.
        """
        self._stream.wait_stream(self._accelerator.current_stream(self._device))
        with self._accelerator.stream(self._stream), recorder.span(COPY, "copy between host and device"):
            target.copy_(source, non_blocking=True)
            event = self._accelerator.Event()
            event.record()
        return PendingCopy(self, event, source)

    def stream(self) -> AbstractContextManager[object]:
        """Context with the copy stream as current stream."""
        return self._accelerator.stream(self._stream)

    def deliver(self, target: torch.Tensor, source: torch.Tensor, pool: BufferPool) -> None:
        """Round a host tensor to the dtype of a device tensor and copy it there, without waiting.

        Args:
            target: on the device; the current stream sees the new values.
            source: on the host, of any dtype; may change after this returns.
            pool: pool of the intermediate buffer.
        """
        buffer = pool.take(target.nbytes)
        staged = buffer.view(target.dtype)
        staged.copy_(source)
        arrival = self.copy(target, staged)
        arrival.before_current()
        pool.put(buffer, after=arrival)


def mover_of(device: torch.device) -> AsyncCopier:
    """Return the copier of a device; without index, of the current device of its type."""
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, get_accelerator().current_device())
    return _mover(device)


@cache
def _mover(device: torch.device) -> AsyncCopier:
    return AsyncCopier(device)
