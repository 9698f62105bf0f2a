"""Lists of sample indices in two arrays: what packs and batches of samples are stored as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]


def checked_lengths(lengths: Any) -> Array:
    """Return lengths of sequences as int64.

    Raises:
        DataError: they are no list of integers of at least 1.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        raise DataError(f"lengths are a list of integers, not {sizes.dtype.name} of shape {sizes.shape}")
    if sizes.size and sizes.min() < 1:
        raise DataError(f"sequence {int(sizes.argmin())} has {int(sizes.min())} tokens; each needs at least one")
    return sizes.astype(np.int64)


@dataclass(frozen=True)
class IndexLists:
    """Lists of samples, by their indices.

    Attributes:
        ids: the samples of all lists, one list after the other.
        bounds: list i has `ids[bounds[i]:bounds[i + 1]]`.
        lengths: number of tokens of every sample that was offered, by its index.
        left_out: samples in no list.
    """

    ids: Array
    bounds: Array
    lengths: Array
    left_out: Array

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Array:
        """Return the indices of the samples in a list."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"list {index} of {len(self)}")
        first = index % len(self)
        return self.ids[self.bounds[first] : self.bounds[first + 1]]

    def __iter__(self) -> Iterator[Array]:
        return iter(np.split(self.ids, self.bounds[1:-1])) if len(self) else iter(())

    @property
    def counts(self) -> Array:
        """Return the number of samples in each list."""
        return np.diff(self.bounds)

    @property
    def tokens(self) -> Array:
        """Return the number of tokens of each list."""
        sums = np.concatenate([[0], np.cumsum(self.lengths[self.ids], dtype=np.int64)])
        return sums[self.bounds[1:]] - sums[self.bounds[:-1]]


def reordered(ids: Array, bounds: Array, order: Array) -> tuple[Array, Array]:
    """Return ids and bounds of the lists in another order, or of some of them."""
    counts = np.diff(bounds)[order]
    moved = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ids[np.repeat(bounds[:-1][order] - moved[:-1], counts) + np.arange(moved[-1])], moved


def stable_order(keys: Array) -> Array:
    """Return the order that sorts integers of at least 0, in linear time: numpy sorts 16 bits by digits."""
    order, shift = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable"), 16
    while keys.size and int(keys.max()) >> shift:
        digits = ((keys >> shift) & 0xFFFF).astype(np.uint16)
        order, shift = order[np.argsort(digits[order], kind="stable")], shift + 16
    return order
