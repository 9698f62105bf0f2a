"""Answers pipeline messages of fake ranks.

What a stage would be sent is known once the stage before has been run: its header, and the integers in it, since models
branch on masks. What comes back are gradients of what was sent. The memory of a message is the sender's, until the
receiver has done with it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed.comm.collectives.p2p import Header, Sender, place, take_apart
from deepspeed.comm.shared_memory.doorbell import Until
from deepspeed.errors import CommError

_arrived: set[int] = set()  # addresses of memory that a peer would hold


class UnheardError(CommError):
    """A stage would be sent what nobody knows yet.

    Args:
        rank: that would send it.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has not been run without values yet: what it sends is not known")
        self.rank = rank


@dataclass(frozen=True)
class FakeMessage:
    """What is known of one.

    Args:
        header: of it.
        integers: what its tensors hold, those that are not floating-point ones; None for the others.
    """

    header: Header
    integers: list[Any]

    @classmethod
    def of(cls, header: Header, tensors: list[torch.Tensor]) -> FakeMessage:
        """One that is sent."""
        arrays = [None if t.is_floating_point() or t.is_complex() else t.detach().numpy().copy() for t in tensors]
        return cls(header, arrays)

    def gradients(self) -> FakeMessage:
        """The answer: a gradient for each of its tensors that can have one."""
        leaves = [leaf for leaf in self.header.leaves if leaf.differentiable]
        header, tensors = take_apart([torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves])
        return FakeMessage(header, [None] * len(tensors))

    def arrive(self, shared: bool) -> list[torch.Tensor]:
        """Its tensors at the receiver.

        Args:
            shared: they lie in the sender's memory, and are none of this rank's; else in memory of its own.
        """
        if not shared:
            payload = torch.empty(self.header.nbytes, dtype=torch.uint8)
        else:
            array = np.empty(self.header.nbytes, dtype=np.uint8)
            _arrived.add(array.ctypes.data)
            weakref.finalize(array, _arrived.discard, array.ctypes.data).atexit = False
            payload = torch.from_numpy(array)
        tensors = [place(payload, leaf) for leaf in self.header.leaves]
        for tensor, held in zip(tensors, self.integers, strict=True):
            if held is not None:
                tensor.numpy()[...] = held
        return tensors


def is_of_an_absent_peer(storage: torch.UntypedStorage) -> bool:
    """Whether a storage stands for memory of a rank that is not there."""
    return storage.data_ptr() in _arrived


class _ReadReceipt(Until):
    """Whether a message has been read."""

    def __init__(self) -> None:
        self.over = False

    def ready(self) -> bool:
        return self.over

    def within(self, seconds: float) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


class SimulatedSender(Sender):
    """Sends to a rank that shares memory with this one and is not there: it has read what it is said to have read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reads: dict[Any, _ReadReceipt] = {}
        self._name: Any = None

    def name(self, message: Any) -> None:
        """What the next message is called."""
        self._name = message

    def unread(self) -> list[Any]:
        """Names of the messages that are under way."""
        return list(self._reads)

    def read(self, message: Any) -> None:
        """The peer has read it."""
        self._reads.pop(message).over = True

    def _start(self, buffer: torch.Tensor, header_bytes: int, start: int) -> list[Any]:
        super()._start(buffer, header_bytes, start)
        self._reads[self._name] = _ReadReceipt()
        return [self._reads[self._name]]
