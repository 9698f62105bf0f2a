"""Secondary shards: parts of gathered parameters that the ranks of one host keep for the next gathers (hpZ).

ZeRO++ (arXiv:2306.10209), section 3.2: after a forward has gathered a group over all ranks, each of the n ranks of a
host keeps 1/n of the full buffer. Later gathers of the same values, in backward or in other micro-batches, stay within
the host. A secondary shard is invalid after each change of the values: steps, loads and edits.

A rank that has run another branch has no secondary shard. On the CPU, a gather looks at the versions of its neighbours
without waiting, and gathers over all ranks if one has none. On devices all ranks gather in the same order, so that the
own version decides.
"""

from __future__ import annotations

import torch

from deepspeed.comm.collectives.collectives import SPREAD, Handle, spread
from deepspeed.comm.collectives.one_sided import SharedSlices
from deepspeed.comm.process_groups.axis import Axis, tag_of


class SecondaryShard:
    """This rank's part of a gathered group, which other ranks of the host can read. All ranks of `axis` create theirs.

    Args:
        axis: ranks of one host, see `can_hold`.
        numel: number of elements of the full buffer.
        dtype: dtype of the full buffer.
        device: device of the full buffer.
    """

    def __init__(self, axis: Axis, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.axis, self.cuts = axis, tuple(axis.even_cuts(numel))
        self.span = slice(self.cuts[axis.rank], self.cuts[axis.rank + 1])
        self.values = axis.empty(self.span.stop - self.span.start, dtype, device)
        self.filled = False  # has the present values of the parameters
        self.gathers = 0
        self._channel, self._seq = axis.channel(), 0
        self._fetch: SharedSlices | None = None
        if axis.shared is not None and axis.shared.can_serve(self._channel, self.values):
            self._fetch = SharedSlices(axis)
            self._fetch.serve(self._channel, self.values)

    @staticmethod
    def can_hold(axis: Axis) -> bool:
        """Return whether ranks of this axis can have secondary shards: shared memory, or devices."""
        return axis.size > 1 and (axis.shared is not None or not axis.tagged)

    def fill(self, full: torch.Tensor) -> None:
        """Copy this rank's part of the gathered values, unless it is there already."""
        if not self.filled:
            self.values.copy_(full[self.span])
            self.filled = True
            if self._fetch is not None:  # odd versions are filled
                self._fetch.advance(self._channel)

    def invalidate(self) -> None:
        """Note that the values change. All ranks must call this equally often."""
        if self._fetch is not None:
            for _ in range(1 if self.filled else 2):
                self._fetch.advance(self._channel)
        self.filled = False

    def ready(self) -> bool:
        """Return whether all ranks of the host have the present values."""
        if not self.filled or (self._fetch is None and self.axis.tagged):
            return False
        shared = self.axis.shared
        return shared is None or all(shared.level(peer, self._channel) for peer in self.axis.peers)

    def gather(self, full: torch.Tensor, label: str) -> Handle:
        """Start to gather the values within the host into `full`, if `ready`."""
        self.gathers += 1
        full[self.span] = self.values
        if self._fetch is not None:
            return self._fetch.pull(self._channel, full, self.cuts, label)
        self._seq += 1
        return spread(self.axis, full, self.cuts, tag_of(self._channel, SPREAD, self._seq), label)

    def withdraw(self) -> None:
        """Stop serving."""
        if self._fetch is not None:
            self._fetch.withdraw(self._channel)

    @property
    def channel(self) -> int:
        return self._channel
