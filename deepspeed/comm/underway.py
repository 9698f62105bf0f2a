"""Messages that a device has not finished. Waiting for them orders a stream, so that the host may block on them
anywhere later, inside no collective; the watch looks here for what it would block on."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator

_MOST = 4096  # that are remembered: without a watch nobody takes them away


class Underway:
    """The messages of this process that its streams wait for, oldest first.

    Threads that communicate add; one other thread, of the watch, looks.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[str, Any, float]] = deque(maxlen=_MOST)
        self._spent: deque[Any] = deque(maxlen=_MOST)  # events to be used again: making one costs more than recording

    def add(self, label: str, tensor: torch.Tensor) -> None:
        """The current stream has just been made to wait for a message.

        Args:
            label: of the message.
            tensor: what travels; nothing is remembered of messages between hosts, which are awaited by the host.
        """
        if tensor.device.type in ("cpu", "meta"):
            return
        try:
            event = self._spent.pop()
        except IndexError:
            event = get_accelerator().Event()
        event.record()
        self._entries.append((label, event, time.monotonic()))

    def oldest(self) -> tuple[str, float] | None:
        """The first message that is not over, and the seconds since it was asked for."""
        while self._entries:
            label, event, since = self._entries[0]
            try:
                over = event.query()
            except RuntimeError:  # the device has failed, which whoever uses it next is told
                return None
            if not over:
                return label, time.monotonic() - since
            with suppress(IndexError):  # so many were added meanwhile that this one fell out
                self._entries.popleft()
            self._spent.append(event)
        return None


underway = Underway()
