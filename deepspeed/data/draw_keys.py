"""Keys of random draws inside a model's forward: from counters of the run, without communication or random states.

A key is (update, micro-batch, call): `call` counts the calls of one layer in one micro-batch. So all ranks have equal
keys, and a resumed run has those of the run it continues. In a recomputation (activation checkpointing) a layer gets
the key of the call that is recomputed.

[Note: keys of a recomputation] Mostly, draws happen outside of checkpoints, so they are not repeated. Where the layer's
call is inside a checkpoint of `deepspeed.checkpointing`, the checkpoint takes a `snapshot` of the counters and gives it
back with `replay`. Inside torch's own checkpoint, the call is recognized by the storage of the layer's input, which the
checkpoint has kept since that call; if several calls had this storage, the recomputation is refused.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.errors import UsageError
from deepspeed.foundation.saved_tensors import in_backward


class DrawKey(NamedTuple):
    """Position of one call of a layer: numbers of the update, of the micro-batch and of the call in it, each from 0."""

    update: int
    micro_batch: int
    call: int


@dataclass
class _LayerCall:
    """A call of a layer in the current update, for its recomputation."""

    key: DrawKey
    storage: StorageWeakRef  # of the layer's input: no other storage has its identity while this exists
    recomputed: bool = False


Counts = tuple[tuple[int, int], dict[int, int]]  # (update, micro-batch), and the calls of each layer in it
_REMEMBERED = 4096  # calls of a layer that a recomputation may follow
_counters: weakref.WeakSet[DrawKeys] = weakref.WeakSet()
_replayed: ContextVar[dict[int, Counts] | None] = ContextVar("counts of a recomputation, by counter", default=None)


class DrawKeys:
    """Counter of the calls of a model's layers.

    Args:
        position: returns the numbers of the current update and micro-batch, equal on all ranks.
    """

    def __init__(self, position: Callable[[], tuple[int, int]]) -> None:
        self._position = position
        self._last = (-1, -1)
        self._counts: dict[int, int] = {}
        self._calls: dict[int, deque[_LayerCall]] = {}
        _counters.add(self)

    def next(self, layer: int, hidden: torch.Tensor) -> DrawKey:
        """Return the key of a layer's call that begins now; in a recomputation, the key of the recomputed call.

        Args:
            layer: number of the layer.
            hidden: its input.

        Raises:
            UsageError: it is unknown which call torch's checkpoint recomputes.
        """
        replayed = (_replayed.get() or {}).get(id(self))
        if replayed is not None:
            return self._count(layer, replayed)
        if in_backward():
            return self._recomputed(layer, hidden)
        key = self._count(layer, self._current())
        self._calls.setdefault(layer, deque(maxlen=_REMEMBERED)).append(
            _LayerCall(key, StorageWeakRef(hidden.untyped_storage()))
        )
        return key

    def snapshot(self) -> Counts:
        """Return the counts before the next call."""
        position, counts = self._current()
        return position, dict(counts)

    def _current(self) -> Counts:
        position = self._position()
        if position != self._last:
            if position[0] != self._last[0]:
                self._calls.clear()
            self._counts.clear()
            self._last = position
        return position, self._counts

    @staticmethod
    def _count(layer: int, counts: Counts) -> DrawKey:
        (update, micro_batch), calls = counts
        calls[layer] = calls.get(layer, 0) + 1
        return DrawKey(update, micro_batch, calls[layer] - 1)

    def _recomputed(self, layer: int, hidden: torch.Tensor) -> DrawKey:
        """Return the key of the call that torch's checkpoint recomputes; see [Note: keys of a recomputation]."""
        calls, storage = self._calls.get(layer, ()), StorageWeakRef(hidden.untyped_storage())
        same = [call for call in calls if call.storage.cdata == storage.cdata]
        waiting = [call for call in same or calls if not call.recomputed]
        candidates = waiting or same[-1:]  # a second backward recomputes a call again
        if len(candidates) != 1:
            raise UsageError(
                f"layer {layer} is recomputed in backward, and {len(candidates)} of its calls may be meant: checkpoint "
                "with deepspeed.checkpointing.checkpoint, which knows the call, or give each forward its own input"
            )
        call = candidates[0]
        call.recomputed = True
        return call.key


def snapshot() -> dict[int, Counts]:
    """Return the counts of all counters, for `replay`; empty without counters."""
    return {id(counter): counter.snapshot() for counter in _counters}


@contextmanager
def replay(counts: dict[int, Counts]) -> Iterator[None]:
    """Context of a recomputation of calls that began with these counts."""
    token = _replayed.set({counter: (position, dict(calls)) for counter, (position, calls) in counts.items()})
    try:
        yield
    finally:
        _replayed.reset(token)


def number_of(*parts: int) -> int:
    """Return a 64-bit hash of integers: the seed of a draw."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniform(*parts: int) -> float:
    """Return a number in [0, 1) that integers determine."""
    return (number_of(*parts) >> 11) / 2.0**53
