"""What each rank is about to do, compared by name before it does it: for messages that are paired by order alone."""

from __future__ import annotations

import hashlib
import itertools

import torch

from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import SMALL, has_host_backend, spread, tag_of
from deepspeed.errors import OrderError
from deepspeed.foundation.simulation import simulating

_CHANNEL = (1 << 17) - 1  # counted channels begin at the other end
_BYTES = 512  # of a message: a digest, and as much of the words as there is room for
_DIGEST = 8


class Lockstep:
    """Comparisons of the ranks of one axis, over the host's backend, whose messages carry tags.

    Args:
        axis: of a device, with a backend for the host too (`possible`).
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = Axis(axis.name, axis.ranks, axis.rank, axis.group, tagged=True)
        self._numbers = itertools.count()
        self.compared = 0  # so far

    @staticmethod
    def possible(axis: Axis) -> bool:
        """Whether the ranks of an axis can and need to compare."""
        return axis.size > 1 and not axis.tagged and has_host_backend(axis)

    def compare(self, what: str) -> None:
        """All ranks are about to do the same. All of them call together, and all of them raise.

        Args:
            what: in words, equal on all ranks.

        Raises:
            OrderError: they are not; it says what each rank is about to do.
        """
        self.compared += 1
        if simulating():  # the other ranks would say the same
            return
        axis, words = self.axis, what.encode()
        own = hashlib.blake2b(words, digest_size=_DIGEST).digest() + words[: _BYTES - _DIGEST]
        table = torch.zeros(axis.size * _BYTES, dtype=torch.uint8)
        table[axis.rank * _BYTES :][: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        cuts = [rank * _BYTES for rank in range(axis.size + 1)]
        spread(axis, table, cuts, tag_of(_CHANNEL, SMALL, next(self._numbers)), f"comparison before {what}").wait()
        rows = [bytes(row) for row in table.view(axis.size, _BYTES).tolist()]
        if len(set(rows)) > 1:
            raise OrderError(_difference(axis, rows))


def _difference(axis: Axis, rows: list[bytes]) -> str:
    by_words: dict[bytes, list[str]] = {}
    for rank, row in zip(axis.ranks, rows, strict=True):
        by_words.setdefault(row, []).append(str(rank))
    told = "; ".join(
        f"rank {', '.join(ranks)}: {row[_DIGEST:].rstrip(bytes(1)).decode(errors='replace')}"
        for row, ranks in by_words.items()
    )
    return (
        f"ranks are about to do different things where all must do the same, because the device's messages carry no "
        f"names: {told}. Let every rank use the same modules in the same order (a module that a rank does not need "
        f"can run on zeros); on stages 0 to 2 ranks may differ"
    )
