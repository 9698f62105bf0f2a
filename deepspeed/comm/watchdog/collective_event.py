"""Record of one collective, which notifies each observer of start, wait and end.

| notified by                  | when                                  | observers, in this order                   |
|------------------------------|---------------------------------------|--------------------------------------------|
| creation of a `MessageEvent` | the message has started               | comms logger, span recorder (clocks)       |
| `ClientCollective.time`      | before `begin`                        | comms logger (clock)                       |
| `order`                      | before `begin`                        | desync trail                               |
| `begin`                      | the host calls the backend, or waits  | alarms of others, span recorder, page      |
| `end`, end of `with`         | the host continues                    | (report of an error,) page, span recorder  |
| `arrive`                     | a device stream waits for the message | pending device work                        |
| `complete`                   | the received data has been used       | comms logger, span recorder (start to end) |

The page (`LastCollectivePage`) contains the label of the last collective; the watchdog's thread and other ranks on this
machine read it. A disabled observer costs one branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.comms_logger import comms_logger
from deepspeed.comm.watchdog.desync import trail
from deepspeed.comm.watchdog.last_collective import INSIDE, OUTSIDE, underway
from deepspeed.comm.watchdog.watchdog import here
from deepspeed.foundation.spans import CALL, FLIGHT, WAIT, now, recorder

# Words in the backends' errors after a failure of the network or of another rank; other errors are the caller's own.
_NETWORK = ("timed out", "timeout", "connection", "peer", "gloo/transport")


class CollectiveEvent:
    """A collective, or a part of one; the host is inside of it between `begin` and `end`, or in a `with` statement.

    Args:
        label: name in error reports and logs.
        ranks: global ranks that an error report lists; None: all ranks.
        category: category of the span, one of `foundation.spans`.
    """

    __slots__ = ("label", "ranks", "category")

    def __init__(self, label: str, ranks: Sequence[int] | None = None, category: str = CALL) -> None:
        self.label, self.ranks, self.category = label, ranks, category

    def order(self, kind: str, owner: Any, size: int = 0, label: str = "") -> None:
        """Record a collective in the desync trail (`watchdog/desync.py`). All ranks of `owner` call this in one order.

        Args:
            kind: kind of caller (`public`, `internal`, `groups`); each kind has its own order.
            owner: the process group or axis.
            size: number of elements, equal on every rank; 0: not compared.
            label: text that is compared between ranks; empty: the event's label.
        """
        if trail.interval:
            world = isinstance(owner, dist.ProcessGroup)
            ranks = (lambda: dist.get_process_group_ranks(owner)) if world else (lambda: owner.ranks)
            trail.enter(owner, kind, ranks, label or self.label, size)

    @classmethod
    def of_world(cls, label: str) -> CollectiveEvent:
        """Create the event of a collective of all ranks, recorded in the desync trail."""
        event = cls(label, category=WAIT)
        event.order("groups", dist.group.WORLD)
        return event

    def begin(self) -> None:
        """Record that the host enters the collective; raises CommError if the watchdog has reported a failure."""
        if here.resting and here.watcher is not None:
            here.watcher.go_on()
        if here.verdict is not None:
            here.raise_if_alarmed(self.label)
        if recorder.on:
            recorder.enter(self.category, self.label)
        here.page.number += 1
        here.page.write(self.label, INSIDE)

    __enter__ = begin
    end = staticmethod(here.leave_collective)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            here.page.turn(OUTSIDE)
            if recorder.on:
                recorder.leave()
            return
        try:
            if self.is_remote(error):
                raise watchdog.failed(self.label, error, self.ranks) from error
        finally:
            here.leave_collective()

    def is_remote(self, error: BaseException) -> bool:
        """Return whether an error came from the network or another rank, so that it must be reported to all ranks."""
        return isinstance(error, RuntimeError)


class ClientCollective(CollectiveEvent):
    """A collective that the client calls through `deepspeed.comm`. Errors of its arguments are raised unchanged."""

    __slots__ = ("_timed",)

    def __init__(self, label: str) -> None:
        self.label, self.ranks, self.category = label, None, CALL
        self._timed: tuple[Any, str, int, int, str, Any] | None = None

    def time(self, operation: str, message: Any, group: Any, note: str) -> None:
        """Time the collective for the comms logger; call this before `begin`.

        Args:
            operation: name of the torch.distributed function.
            message: tensor, or list of tensors, whose bytes are logged.
            group: process group; None: the world.
            note: text of the log line.
        """
        begun, count = comms_logger.begin(message), dist.get_world_size(group)
        self._timed = (begun, operation, self._size(message), count, note, dist.group.WORLD if group is None else group)

    @classmethod
    def _size(cls, message: Any) -> int:
        if isinstance(message, torch.Tensor):
            return message.numel() * message.element_size()
        return sum(map(cls._size, message)) if isinstance(message, list) else 0

    def note_order(self, group: Any, label: str) -> None:
        """Record the call as `label` in the desync trail, if the group (None: the world) has this and other ranks."""
        group = dist.group.WORLD if group is None else group
        if isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1:
            self.order("public", group, 0, label)

    def complete(self) -> None:
        if self._timed is not None:
            begun, operation, size, count, note, group = self._timed
            comms_logger.end(begun, operation, size, count, note)
            if count > 1:
                received = comms_logger.received_in(operation, size, count)
                comms_logger.arrived(sorted(dist.get_process_group_ranks(group)), received)

    def is_remote(self, error: BaseException) -> bool:
        text = str(error).lower()
        return isinstance(error, RuntimeError) and (
            isinstance(error, dist.DistError) or any(word in text for word in _NETWORK)
        )


class MessageEvent(CollectiveEvent):
    """A message of this package that was already started.

    Args:
        label: name in logs; its first word is the operation.
        ranks: global ranks that take part.
        payload: tensor whose bytes are logged; None: the message is not logged.
        received: bytes that come from other ranks.
        on_device: a device stream waits for the message, not the host.
        began: start time in nanoseconds (`spans.now`); 0: now.
    """

    __slots__ = ("_payload", "_nbytes", "_received", "_began", "_clock")

    def __init__(
        self,
        label: str,
        ranks: Sequence[int],
        payload: torch.Tensor | None,
        received: int = 0,
        on_device: bool = False,
        began: int = 0,
    ) -> None:
        self.label, self.ranks, self.category = label, ranks, WAIT
        self._nbytes = payload.numel() * payload.itemsize if payload is not None and len(ranks) > 1 else 0
        self._received, self._payload = received, payload if on_device else None
        self._began = began or now()
        self._clock = comms_logger.begin(payload) if self._payload is not None and comms_logger.enabled else None

    def arrive(self) -> None:
        """Record that the current device stream waits for the message from now on."""
        if self._payload is not None:
            underway.add(self.label, self._payload)
            self._payload = None

    def complete(self) -> None:
        if not self._nbytes:
            return
        operation = self.label.partition(" ")[0]
        if comms_logger.enabled and comms_logger.wants(operation, False):
            begun = self._began if self._clock is None else self._clock
            ranks = self.ranks or ()
            comms_logger.end(begun, operation, self._nbytes, len(ranks), self.label, self._received)
            comms_logger.arrived(ranks, self._received)
        if recorder.on:
            recorder.add(self._began, FLIGHT, self.label, "", self._received)

    def unrecorded(self) -> None:
        """Exclude the message from the comms logger and the spans, which record the enclosing call."""
        self._nbytes = 0
