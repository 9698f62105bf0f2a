"""The loader made of `training_data`: each data-parallel rank reads its own share of every epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from deepspeed.errors import DataError
from deepspeed.foundation.log import say_once


class _Share(IterableDataset):  # type: ignore[type-arg]
    """Every `world`-th sample of a stream; a last incomplete round is dropped, so that all ranks get as many."""

    def __init__(self, stream: IterableDataset[Any], rank: int, world: int) -> None:
        self.stream, self.rank, self.world = stream, rank, world

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        while len(one_round := list(itertools.islice(samples, self.world))) == self.world:
            yield one_round[self.rank]


class DeepSpeedDataLoader:
    """A torch DataLoader over this rank's share of a dataset, shuffled anew in each epoch.

    A dataset with indices is split by torch's DistributedSampler: every rank gets as many samples, the last few being
    repeated (or dropped with `drop_last`). A stream is split by position.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int = 0,
        world: int = 1,
        sampler: Sampler[Any] | None = None,
        shuffle: bool = True,
        **loader: Any,
    ) -> None:
        """Make the loader.

        Args:
            dataset: samples by index, or a stream that yields the same samples on every rank.
            batch_size: samples of a micro-batch on one rank (`train_micro_batch_size_per_gpu`).
            rank: data-parallel rank.
            world: data-parallel size.
            sampler: chooses this rank's indices instead of the default.
            shuffle: draw a new order in each epoch, the same on all ranks.
            loader: arguments of torch's DataLoader: collate_fn, num_workers, pin_memory, drop_last
                (`dataloader_drop_last`) and so on.

        Raises:
            DataError: the dataset is no dataset, is empty, or gives no batch.
        """
        if isinstance(dataset, DataLoader):
            raise DataError("training_data is a DataLoader; pass its dataset, or loop over the DataLoader yourself")
        self.batch_size = batch_size
        self.epoch = 0
        drop_last = bool(loader.get("drop_last", False))
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
            raise DataError(
                f"training_data is a {type(dataset).__name__}, which has no length; pass a map-style dataset, a list "
                f"or a torch IterableDataset"
            )
        if isinstance(dataset, IterableDataset):
            dataset = self._split(dataset, rank, world, sampler)
        elif sampler is None:
            if not len(dataset):  # type: ignore[arg-type]
                raise DataError("training_data has no samples")
            sampler = DistributedSampler(dataset, world, rank, shuffle=shuffle, drop_last=drop_last)
        self.sampler = sampler
        self.loader = DataLoader(dataset, batch_size, sampler=sampler, **loader)
        if sampler is not None and not len(self.loader):
            raise DataError(
                f"training_data has {len(dataset)} samples; with drop_last, {world} data-parallel ranks and a "  # type: ignore[arg-type]
                f"micro-batch of {batch_size} no rank gets a full batch: use a smaller micro-batch or drop_last=False"
            )

    @staticmethod
    def _split(stream: IterableDataset[Any], rank: int, world: int, sampler: object) -> IterableDataset[Any]:
        if sampler is not None:
            raise DataError("a sampler chooses indices, but training_data is an IterableDataset, which has none")
        if world == 1:
            return stream
        say_once(
            f"{type(stream).__name__} is split by position over {world} data-parallel ranks; a stream that already "
            "yields other samples on each rank should go into a DataLoader of its own"
        )
        return _Share(stream, rank, world)

    @property
    def dataset(self) -> Dataset[Any]:
        """The dataset that is read (for a stream: this rank's share)."""
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; passes after it count on from there."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)  # type: ignore[union-attr]
        self.epoch += 1
        return iter(self.loader)


class RepeatingLoader:
    """An endless iterator over a loader that starts it again whenever it ends.

    Example:
        batches = RepeatingLoader(loader)
        batch = next(batches)
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Start the first pass.

        Args:
            loader: anything that can be iterated again and again.
        """
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            DataError: the loader gives nothing when started again.
        """
        for batch in self.data_iter:
            return batch
        self.data_iter = iter(self.loader)
        for batch in self.data_iter:
            return batch
        raise DataError(
            f"RepeatingLoader: {type(self.loader).__name__} gives no batch when started again; it is empty, or an "
            "iterator or generator that can be read once (pass the object that makes it)"
        )
