"""The transport of a fake world: messages take no time, and allocate what real ones allocate.

A rank alone runs as one of many (`foundation/fake_mode.py`). Where the many would share memory, `SimulatedMemory`
takes the place of `SharedMemory`: it lends and stages the same buffers, and what peers would have posted is a stand-in
of the same shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from deepspeed.comm.shared_memory.doorbell import Until
from deepspeed.comm.shared_memory.transport import SharedMemory
from deepspeed.foundation.fake_mode import late

_KIND = 7 << 10  # of a tag: what `axis.tag_of` puts there
_EXCHANGE = 0


class _There(Until):
    """Something that has come true, unless ranks are late: then once it is waited for."""

    def __init__(self) -> None:
        self._late = late()

    def ready(self) -> bool:
        return not self._late

    def within(self, seconds: float) -> bool:
        return seconds > 0 or self.ready()

    def wait(self) -> None:
        return None


class SimulatedMemory(SharedMemory):
    """The shared memory of ranks that are not there.

    Args:
        rank: of this process in the group.
        size: ranks of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peers = [r for r in range(size) if r != rank]
        self.serving: dict[int, torch.Tensor] = {}
        self._lent: set[int] = set()  # storages that peers could read, by identity
        self._posted: dict[int, torch.Tensor] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._one = torch.zeros(1)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor that posts without a copy."""
        tensor = torch.empty(numel, dtype=dtype)
        storage = tensor.untyped_storage()
        self._lent.add(storage._cdata)
        weakref.finalize(storage, self._lent.discard, storage._cdata).atexit = False
        return tensor

    def _readable(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._lent

    def drain(self) -> bool:
        """Nothing arrives."""
        return True

    def post(self, tag: int, flat: torch.Tensor, peers: Sequence[int]) -> None:
        """Keep what is posted; as a copy where peers could not read it in place."""
        self._posted[tag] = flat
        if peers and not self._readable(flat):
            self._staged[tag] = self.empty(flat.numel(), flat.dtype)

    def posted(self, tag: int, peers: Sequence[int]) -> Until:
        """All have."""
        return _There()

    def read(self, peer: int, tag: int, dtype: torch.dtype) -> torch.Tensor:
        """What a peer would have posted: as much as this rank, or one element where slices differ in size."""
        if tag & _KIND == _EXCHANGE << 10 and tag in self._posted:
            return self._posted[tag]
        return self._one.to(dtype)

    def acknowledge(self, tag: int, peers: Sequence[int]) -> None:
        """It was read."""

    def acknowledged(self, tag: int, peers: Sequence[int]) -> Until:
        """All have read it."""
        self._posted.pop(tag, None)
        self._staged.pop(tag, None)
        return _There()

    def can_serve(self, channel: int, tensor: torch.Tensor) -> bool:
        """As the real memory would say, but for its number of channels."""
        return tensor.numel() == 0 or self._readable(tensor)

    def serve(self, channel: int, tensor: torch.Tensor) -> None:
        """Keep what is served."""
        self.serving[channel] = tensor

    def advance(self, channel: int) -> None:
        """Versions agree."""

    def reached(self, channel: int, peers: Sequence[int]) -> Until:
        """All have."""
        return _There()

    def level(self, peer: int, channel: int) -> bool:
        """Always."""
        return True

    def served(self, peer: int, channel: int, dtype: torch.dtype) -> torch.Tensor:
        """One element, which fits any slice."""
        return self._one.to(dtype)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place."""

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> None:
        """Into `out`."""

    def all_gather(self, full: torch.Tensor, cuts: Sequence[int], own: torch.Tensor, mark: int = 0) -> None:
        """In place."""

    def broadcast(self, tensor: torch.Tensor, src: int, mark: int = 0) -> None:
        """In place."""

    def close(self) -> None:
        """Let what is served go."""
        self.serving.clear()
