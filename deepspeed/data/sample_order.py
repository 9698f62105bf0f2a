"""Orders of samples that any part of can be computed alone: what is at a position needs nothing that came before."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from deepspeed.data.index_lists import Array

# Above this many samples a permutation in memory (four bytes each) is replaced by a computed one.
LARGE = 1 << 25
_ROUNDS = 6  # of the Feistel network; four are the fewest that pass as a random permutation


class SampleOrder(Protocol):
    """Order in which the samples of a dataset are used, epoch after epoch."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> Array:
        """Return the dataset's indices at positions `start` to `stop` of an epoch; positions after its end belong to
        the epochs that follow.
        """
        ...


class ComputedPermutation:
    """Random permutation of the numbers below `count` in constant memory: a Feistel network over the next power of
    four, applied again where it leaves the range (cycle walking: Black and Rogaway, CT-RSA 2002).

    Args:
        count: how many numbers are permuted.
        key: integers that select the permutation.
    """

    def __init__(self, count: int, *key: int) -> None:
        self.count = count
        self._half = np.uint64(max(1, (max(1, count - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.random.SeedSequence([value % (1 << 63) for value in key]).generate_state(_ROUNDS, np.uint64)

    def _once(self, values: Array) -> Array:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            mixed = right + key  # the finalizer of splitmix64
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & self._mask)
        return (left << self._half) | right

    def __call__(self, positions: Array) -> Array:
        """Return the numbers at these positions, as int64."""
        values = self._once(positions.astype(np.uint64))
        while (outside := values >= self.count).any():
            values[outside] = self._once(values[outside])
        return values.astype(np.int64)


class EpochOrder:
    """Order of one dataset: as it is, or another permutation in each epoch.

    The permutations are those of torch's DistributedSampler (seed + epoch). A dataset of more than 2**25 samples has
    computed ones, which need no memory.

    Args:
        count: number of samples, at least 1.
        seed: seed of the permutations.
        shuffle: whether the order is random.
    """

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True) -> None:
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.count

    def indices(self, epoch: int, start: int, stop: int) -> Array:
        parts = []
        while start < stop:
            ahead, first = divmod(start, self.count)
            last = min(self.count, first + stop - start)
            parts.append(self._within(epoch + ahead, first, last))
            start += last - first
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _within(self, epoch: int, start: int, stop: int) -> Array:
        if not self.shuffle:
            return np.arange(start, stop)
        if self.count > LARGE:
            return ComputedPermutation(self.count, self.seed, epoch)(np.arange(start, stop))
        if epoch != self._epoch:
            draw = torch.Generator().manual_seed(self.seed + epoch)
            dtype = torch.int32 if self.count < 1 << 31 else torch.int64  # the same permutation in half the memory
            self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=draw, dtype=dtype).numpy()
        return self._permutation[start:stop].astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the permutation out: a loader's process draws its own."""
        return {**self.__dict__, "_epoch": -1, "_permutation": np.empty(0, np.int64)}
