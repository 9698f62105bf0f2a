"""Mixtures of datasets by shares of tokens or samples, kept to about one sample at every position, without state."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from deepspeed.data.index_lists import Array
from deepspeed.data.sample_order import ComputedPermutation
from deepspeed.errors import ArgumentError, DataError


def mixture_shares(
    tokens: Sequence[int], temperature: float = 1.0, weights: Sequence[float] | None = None
) -> list[float]:
    """Return the share of each source in a mixture; they sum to 1.

    Args:
        tokens: number of tokens of each source.
        temperature: shares are proportional to tokens ** (1 / temperature): 1 as the sources are, larger more even.
        weights: shares up to a factor; None: by temperature.

    Raises:
        ArgumentError: a weight is negative, all are 0, their number is another than that of the sources, or the
            temperature is not above 0.
        DataError: a source with a share has no tokens.
    """
    if not temperature > 0 or not np.isfinite(temperature):
        raise ArgumentError(f"temperature {temperature} must be a number above 0")
    if weights is None:
        top = max(tokens, default=0)
        weights = [(count / top) ** (1 / temperature) if count else 0.0 for count in tokens]
    if len(weights) != len(tokens):
        raise ArgumentError(f"{len(weights)} weights for {len(tokens)} sources: pass one for each")
    if not all(np.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ArgumentError(f"weights {list(weights)} must be numbers of at least 0, and not all 0")
    empty = [position for position, count in enumerate(tokens) if not count and weights[position]]
    if empty:
        raise DataError(f"source {empty[0]} has weight {weights[empty[0]]} and no tokens")
    total = sum(weights)
    return [weight / total for weight in weights]


class MixtureOrder:
    """Order of a mixture: sample j of source k stands at time (j + 1/2) / share k, and the sources are merged by time.

    So the number of samples from a source never differs by more than about one from its share, and the samples at any
    position can be computed without those before (stride scheduling: Waldspurger and Weihl, 1995). A source that ends
    starts again in another order.

    Args:
        counts: number of samples of each source.
        shares: share of samples from each source; they add up to 1.
        samples: number of samples in an epoch.
        seed: seed of the order inside the sources.
        shuffle: whether the order inside the sources is random.
    """

    def __init__(self, counts: Array, shares: Array, samples: int, seed: int = 0, shuffle: bool = True) -> None:
        self.counts, self.shares, self.samples = counts, shares, samples
        self.seed, self.shuffle = seed, shuffle
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        self._mixed = np.flatnonzero(shares > 0)

    def __len__(self) -> int:
        return self.samples

    def indices(self, epoch: int, start: int, stop: int) -> Array:
        sources, numbers = self.samples_of(epoch * self.samples + start, epoch * self.samples + stop)
        indices = np.empty(len(sources), np.int64)
        for source in np.unique(sources):
            places = np.flatnonzero(sources == source)
            cycles, positions = np.divmod(numbers[places], self.counts[source])
            # numbers rise, so cycles do: each is a part
            for part in np.split(np.arange(len(cycles)), np.flatnonzero(np.diff(cycles)) + 1):
                order = self._order(int(source), int(cycles[part[0]]), positions[part])
                indices[places[part]] = self._offsets[source] + order
        return indices

    def _order(self, source: int, cycle: int, positions: Array) -> Array:
        if not self.shuffle:
            return positions
        return ComputedPermutation(int(self.counts[source]), self.seed, source, cycle)(positions)

    def _until(self, time: float) -> Array:
        """Return how many samples of each mixed source stand at or before a time, by the same formula as the times."""
        shares = self.shares[self._mixed]
        number = np.floor(time * shares + 0.5).astype(np.int64).clip(0)
        number -= (number - 0.5) / shares > time
        return number + ((number + 0.5) / shares <= time)

    def samples_of(self, start: int, stop: int) -> tuple[Array, Array]:
        """Return source and number inside the source of the samples at positions of the whole stream."""
        margin = len(self._mixed)
        first, last = self._until(max(0.0, float(start - margin))), self._until(float(stop + margin))
        many = last - first
        sources = np.repeat(self._mixed, many)
        numbers = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many)
        order = np.lexsort((sources, (numbers + 0.5) / self.shares[sources]))
        order = order[start - first.sum() : stop - first.sum()]
        return sources[order], numbers[order]


class Mixture(Dataset[Any]):
    """Several datasets as one, from which each step takes samples by the sources' shares.

    Pass it as `training_data`, or to `DeepSpeedDataLoader`. An epoch has as many samples as the sources together;
    small sources with large shares are repeated in it.

    Args:
        sources: map-style datasets, in a sequence or by name.
        weights: share of each source, in any unit; None: by size.
        temperature: exponent 1 / temperature of the sizes, if `weights` is None: 1 is by size, larger ones raise the
            shares of small sources.
        by: what shares and sizes count, "tokens" or "samples".
        tokens: number of tokens of each source, in their order (also of named sources), each at least 1; None: the sum
            of `sizes` of indexed datasets.

    Raises:
        DataError: there is no source, one is empty, or numbers of tokens are unknown.
        ArgumentError: `weights`, `temperature` or `by` is wrong; see `mixture_shares`.
    """

    def __init__(
        self,
        sources: Sequence[Any] | Mapping[str, Any],
        weights: Sequence[float] | Mapping[str, float] | None = None,
        temperature: float = 1.0,
        by: Literal["tokens", "samples"] = "tokens",
        tokens: Sequence[int] | None = None,
    ) -> None:
        named = isinstance(sources, Mapping)
        self.names = [str(name) for name in sources] if named else [f"source {i}" for i in range(len(sources))]
        self.sources = list(sources.values()) if isinstance(sources, Mapping) else list(sources)
        self.counts = np.array([len(source) for source in self.sources], np.int64)
        if not self.sources or not self.counts.all():
            empty = [name for name, count in zip(self.names, self.counts, strict=True) if not count]
            raise DataError(f"a mixture needs sources with samples; empty: {', '.join(empty) or 'the list of sources'}")
        if by not in ("tokens", "samples"):
            raise ArgumentError(f"by={by!r} has to be 'tokens' or 'samples'")
        sizes = self.counts if by == "samples" else self._tokens(tokens)
        self.weights = self._weights(sizes, temperature, weights)
        rates = self.weights / (sizes / self.counts)  # samples, of which some sources have longer ones
        self.shares = rates / rates.sum()
        self._offsets: list[int] = [0, *np.cumsum(self.counts).tolist()]

    def _tokens(self, tokens: Sequence[int] | None) -> Array:
        if tokens is None:
            without = [
                n for n, source in zip(self.names, self.sources, strict=True) if getattr(source, "sizes", None) is None
            ]
            if without:
                raise DataError(
                    f"the number of tokens of {', '.join(without)} is unknown: pass tokens=[…], or by='samples'"
                )
            return np.array([np.sum(source.sizes, dtype=np.int64) for source in self.sources])
        if len(tokens) != len(self.sources) or min(tokens) < 1:
            raise DataError(f"tokens has {len(tokens)} numbers for {len(self.sources)} sources; each is at least 1")
        return np.array(tokens, np.int64)

    def _weights(
        self, sizes: Array, temperature: float, weights: Sequence[float] | Mapping[str, float] | None
    ) -> Array:
        if isinstance(weights, Mapping):
            unknown, missing = set(weights) - set(self.names), set(self.names) - set(weights)
            if unknown or missing:
                raise ArgumentError(f"weights: unknown {sorted(unknown)}, missing {sorted(missing)} of {self.names}")
            weights = [weights[name] for name in self.names]
        return np.array(mixture_shares(sizes.tolist(), temperature, weights))

    def __len__(self) -> int:
        return self._offsets[-1]

    def source_of(self, index: int) -> int:
        """Return the number of the source that a sample is from."""
        return bisect_right(self._offsets, index) - 1

    def __getitem__(self, index: int) -> Any:
        """Return a sample by its index in all sources, one after the other."""
        source = self.source_of(index)
        return self.sources[source][int(index) - self._offsets[source]]

    def sample_order(self, seed: int, shuffle: bool) -> MixtureOrder:
        """Return the order in which a loader uses the samples."""
        return MixtureOrder(self.counts, self.shares, len(self), seed, shuffle)
