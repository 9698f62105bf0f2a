"""Copies between host memory and a device on a separate stream.

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
    """One copy under way."""

    def __init__(self, mover: AsyncCopier, event: object, source: torch.Tensor) -> None:
        self._mover = mover
        self._event, self._source = event, source  # the source lives until the copy is over

    def wait(self) -> None:
        """Block the host until the copy is over."""
        with recorder.span(COPY, "wait for a copy between host and device"):
            self._event.synchronize()  # type: ignore[attr-defined]

    def done(self) -> bool:
        return self._event.query()  # type: ignore[attr-defined]

    def stream(self) -> AbstractContextManager[object]:
        """Inside, the copying stream is the current one: what is started there comes after the copy."""
        return self._mover.stream()

    def before_current(self) -> None:
        """What the current stream does from now on comes after the copy; the host goes on."""
        self._event.wait()  # type: ignore[attr-defined]


class AsyncCopier:
    """Copies for one device, in the order they were asked for.

    Args:
        device: with its index, where there are several of its kind.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = get_accelerator()
        self._device = device
        elsewhere = self._accelerator.on_accelerator(torch.empty(0, device=device)) and device.type != "cpu"
        self._stream = self._accelerator.Stream(device=device) if elsewhere else self._accelerator.Stream()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> PendingCopy:
        """Start copying, after what the current stream has been given so far.

        Args:
            target: host or device tensor, not read until the copy is over.
            source: the other side, of the same dtype.
        """
        self._stream.wait_stream(self._accelerator.current_stream(self._device))
        with self._accelerator.stream(self._stream), recorder.span(COPY, "copy between host and device"):
            target.copy_(source, non_blocking=True)
            event = self._accelerator.Event()
            event.record()
        return PendingCopy(self, event, source)

    def stream(self) -> AbstractContextManager[object]:
        """Inside, the copying stream is the current one."""
        return self._accelerator.stream(self._stream)

    def deliver(self, target: torch.Tensor, source: torch.Tensor, pool: BufferPool) -> None:
        """Round a host tensor into the dtype of a device tensor and send it there, without waiting.

        Args:
            target: on the device; the current stream sees the new values.
            source: on the host, of any dtype; may change as soon as this returns.
            pool: lends the buffer in between.
        """
        buffer = pool.take(target.nbytes)
        staged = buffer.view(target.dtype)
        staged.copy_(source)
        arrival = self.copy(target, staged)
        arrival.before_current()
        pool.put(buffer, after=arrival)


def mover_of(device: torch.device) -> AsyncCopier:
    """The mover of a device; without an index, of the current one of its kind."""
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, get_accelerator().current_device())
    return _mover(device)


@cache
def _mover(device: torch.device) -> AsyncCopier:
    return AsyncCopier(device)
