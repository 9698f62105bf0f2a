"""Which samples a rank reads next: indices or parts of a stream from a position that all ranks and meshes share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data._utils import worker

from deepspeed.data.dynamic_batches import TokenBatchSampler
from deepspeed.data.sample_order import SampleOrder
from deepspeed.errors import DataError
from deepspeed.foundation.log import log_once, log_rank0

# What happens to the samples at the end of an epoch that are too few for a batch on every rank: some are repeated,
# they are dropped, or the batch is filled from the next epoch, which begins after those.
LastBatch = Literal["pad", "drop", "carry"]
_CHUNK = 1 << 16  # indices that are computed at once


class Position(Protocol):
    """Part of one rank in a pass, from a position on.

    Attributes:
        start: units of the epoch to skip, which all ranks together have read.
    """

    start: int

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next pass."""
        ...

    def after(self, seen: int) -> tuple[int, int]:
        """Return (epochs to go on by, position in that epoch) after a whole pass that ended at position `seen`."""
        ...

    def before(self, epoch: int, seen: int, batches: int, size: int) -> tuple[int, int]:
        """Return the epoch and position `batches` batches before a position; `size`: samples of each, of all ranks."""
        ...


def _back(epoch: int, seen: int, count: int, whole: Callable[[int], int]) -> tuple[int, int]:
    """Return the epoch and position `count` units before a position; `whole` returns the units of an epoch."""
    while epoch and seen < count:
        count, epoch = count - seen, epoch - 1
        seen = whole(epoch)
    return epoch, max(0, seen - count)


def _back_in_batches(epoch: int, seen: int, batches: int, size: int, whole: int) -> tuple[int, int]:
    """As `_back` in batches, of which the last in an epoch may be smaller; `whole`: batches of an epoch."""
    epoch, seen_batches = _back(epoch, -(-seen // size), batches, lambda _: whole)
    return epoch, seen_batches * size


class OrderedPosition(Sampler[int]):
    """This rank's indices from any position on, for any number of ranks: position p goes to rank p modulo ranks.

    Args:
        order: order of the samples, which does not depend on ranks.
        rank: data-parallel rank.
        world: data-parallel size.
        batch_size: samples of a micro-batch on one rank.
        last: what happens at the end of an epoch.
    """

    def __init__(self, order: SampleOrder, rank: int, world: int, batch_size: int, last: LastBatch) -> None:
        self.order, self.rank, self.world, self.batch_size, self.last = order, rank, world, batch_size, last
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _stop(self) -> int:
        left = max(0, len(self.order) - self.start)
        if self.last == "drop":
            return self.start + left // self.world * self.world
        unit = self.world * (self.batch_size if self.last == "carry" else 1)
        return self.start + -(-left // unit) * unit

    def __len__(self) -> int:
        return (self._stop() - self.start) // self.world

    def __iter__(self) -> Iterator[int]:
        stop, epoch = self._stop(), self.epoch
        # a multiple of the ranks, so that each chunk begins with rank 0
        step = -(-_CHUNK // self.world) * self.world
        for first in range(self.start, stop, step):
            positions = self._indices(epoch, first, min(stop, first + step))
            yield from positions[self.rank :: self.world].tolist()

    def _indices(self, epoch: int, start: int, stop: int) -> Any:
        count = len(self.order)
        if self.last == "carry" or stop <= count:
            return self.order.indices(epoch, start, stop)
        # as torch's DistributedSampler does: the first samples of the same epoch once more
        more = min(stop - max(start, count), count)
        first = self.order.indices(epoch, 0, more)[np.arange(max(start, count) - count, stop - count) % more]
        return np.concatenate([self.order.indices(epoch, min(start, count), count), first])

    def between(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices at positions of an epoch, of all ranks; positions that a pass does not reach have none."""
        return self._indices(epoch, start, min(stop, self._stop())).tolist()

    def after(self, seen: int) -> tuple[int, int]:
        return divmod(seen, len(self.order)) if self.last == "carry" else (1, 0)

    def before(self, epoch: int, seen: int, batches: int, size: int) -> tuple[int, int]:
        count = len(self.order)
        if self.last == "carry":
            return divmod(max(0, epoch * count + seen - batches * size), count)
        whole = count // size if self.last == "drop" else -(-count // size)
        return _back_in_batches(epoch, seen, batches, size, whole)


class SkippingPosition(Sampler[Any]):
    """A caller's sampler without the indices that were already read."""

    def __init__(self, sampler: Sampler[Any], ranks: int) -> None:
        if not hasattr(sampler, "__len__"):
            raise DataError(f"{type(sampler).__name__} has no length; a sampler needs one, so that ranks step together")
        if not hasattr(sampler, "set_epoch"):
            log_once(
                f"{type(sampler).__name__} has no set_epoch: a run that goes on in the middle of a pass skips as many "
                "samples as were read, and only an order that is equal then repeats none"
            )
        self.sampler, self.ranks = sampler, ranks
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the sampler if it has `set_epoch`."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.start // self.ranks)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.start // self.ranks, None)

    def after(self, seen: int) -> tuple[int, int]:
        return 1, 0

    def before(self, epoch: int, seen: int, batches: int, size: int) -> tuple[int, int]:
        whole = -(-len(self.sampler) * self.ranks // size)  # type: ignore[arg-type]
        return _back_in_batches(epoch, seen, batches, size, whole)


class TokenBatchPosition(Sampler[list[int]]):
    """Micro-batches of one rank by tokens; positions count micro-batches of all ranks."""

    def __init__(self, sampler: TokenBatchSampler) -> None:
        self.sampler = sampler
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.sampler.epoch:
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return max(0, self.sampler.batches_of(self.sampler.epoch) - self.start) // self.sampler.world

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.from_position(self.start)

    def after(self, seen: int) -> tuple[int, int]:
        return 1, 0

    def before(self, epoch: int, seen: int, batches: int, size: int) -> tuple[int, int]:
        return _back(epoch, seen, batches * self.sampler.world, self.sampler.batches_of)


class StreamPosition(IterableDataset):  # type: ignore[type-arg]
    """Every `world`-th sample of an iterable dataset, which is read by one process of the loader.

    At its end the samples that are too few for all ranks are dropped; with last="carry", the stream starts again and
    fills the batch, and the next pass begins after those samples.
    """

    def __init__(self, stream: IterableDataset[Any], rank: int, world: int, batch_size: int, last: LastBatch) -> None:
        self.stream, self.rank, self.world, self.batch_size, self.last = stream, rank, world, batch_size, last
        self.epoch, self.start = 0, 0
        # the stream's length, once it is known: written by the process that reads, read by the one that trains
        self._length = torch.full((1,), -1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _samples(self, epoch: int) -> Iterator[Any]:
        worker._worker_info = None  # the only reader: streams that divide their samples among readers do so otherwise
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)  # type: ignore[attr-defined]
        return iter(self.stream)

    def _counted(self) -> Iterator[Any]:
        """Yield the samples of the epoch and remember how many there are."""
        count = 0
        for count, sample in enumerate(self._samples(self.epoch), start=1):  # noqa: B007
            yield sample
        self._length[0] = count

    def __iter__(self) -> Iterator[Any]:
        samples = itertools.islice(self._counted(), self.start, None)
        unit = self.world * (self.batch_size if self.last == "carry" else 1)
        while len(together := list(itertools.islice(samples, unit))) == unit:
            yield from together[self.rank :: self.world]
        if self.last != "carry" or not together:
            return
        for epoch in itertools.count(self.epoch + 1):
            before = len(together)
            together += itertools.islice(self._samples(epoch), unit - before)
            if len(together) == unit:
                yield from together[self.rank :: self.world]
                return
            if len(together) == before:
                raise DataError(f"{type(self.stream).__name__} has no samples when it is read again")

    def after(self, seen: int) -> tuple[int, int]:
        length = int(self._length[0])
        return divmod(seen, length) if self.last == "carry" and length > 0 else (1, 0)

    def before(self, epoch: int, seen: int, batches: int, size: int) -> tuple[int, int]:
        length = int(self._length[0])
        if length <= 0:
            if batches * size > seen:
                log_rank0(f"{type(self.stream).__name__}: its length is unknown, so it goes on at its beginning")
            return epoch, max(0, seen - batches * size)
        if self.last == "carry":
            return divmod(max(0, epoch * length + seen - batches * size), length)
        whole = length // self.world * self.world
        return _back_in_batches(epoch, seen, batches, size, whole // size if self.last == "drop" else -(-whole // size))
