"""Data loader of `training_data`: each data-parallel rank reads its part of every epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from deepspeed.errors import DataError
from deepspeed.foundation.log import log_once
from deepspeed.foundation.spans import LOADER, recorder

_END = object()


class _Share(IterableDataset):  # type: ignore[type-arg]
    """Every `world`-th sample of an iterable dataset; the remainder is dropped, so that all ranks get equally many."""

    def __init__(self, stream: IterableDataset[Any], rank: int, world: int) -> None:
        self.stream, self.rank, self.world = stream, rank, world
        self.start = 0  # samples of the stream to skip, which an earlier run has read

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: a stream has only one order."""

    def __iter__(self) -> Iterator[Any]:
        samples = itertools.islice(iter(self.stream), self.start, None)
        while len(one_round := list(itertools.islice(samples, self.world))) == self.world:
            yield one_round[self.rank]


class _FromHere(Sampler[int]):
    """This rank's indices of an epoch, starting at any position, for any number of ranks.

    The order is that of torch's DistributedSampler and does not depend on the ranks; position p after the start goes to
    rank p modulo the number of ranks.
    """

    def __init__(self, whole: DistributedSampler[Any]) -> None:
        self.whole = whole
        self.start = 0  # samples of the epoch to skip, which all ranks together have read

    def set_epoch(self, epoch: int) -> None:
        self.whole.set_epoch(epoch)

    def _total(self) -> int:
        samples, ranks = len(self.whole.dataset), self.whole.num_replicas  # type: ignore[arg-type]
        left = max(0, samples - self.start)
        return left // ranks * ranks if self.whole.drop_last else -(-left // ranks) * ranks

    def __len__(self) -> int:
        return self._total() // self.whole.num_replicas

    def __iter__(self) -> Iterator[int]:
        if not self.start:
            return iter(self.whole)
        sampler = DistributedSampler(
            self.whole.dataset, 1, 0, shuffle=self.whole.shuffle, seed=self.whole.seed, drop_last=False
        )
        sampler.set_epoch(self.whole.epoch)
        order = list(sampler)
        ahead = order[self.start :]
        short = self._total() - len(ahead)
        padded = ahead + order[:short] if short >= 0 else ahead[:short]
        return iter(padded[self.whole.rank :: self.whole.num_replicas])


class _Skipping(Sampler[Any]):
    """A client's sampler without the indices that were already read."""

    def __init__(self, sampler: Sampler[Any], ranks: int) -> None:
        self.sampler, self.ranks = sampler, ranks
        self.start = 0  # samples to skip, which all ranks together have read

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the sampler if it has `set_epoch`."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.start // self.ranks)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.sampler), self.start // self.ranks, None)


class DeepSpeedDataLoader:
    """A torch DataLoader over this rank's share of a dataset.

    A map-style dataset is split by torch's DistributedSampler: every rank gets equally many samples, by repeating a few
    (with `drop_last`: dropping a few). An iterable dataset is split by position, and its remainder is dropped.
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
        part: Callable[[Any], Any] | None = None,
        **loader: Any,
    ) -> None:
        """Create the loader.

        Args:
            dataset: map-style dataset, or an iterable that yields the same samples on every rank.
            batch_size: samples of a micro-batch on one rank (`train_micro_batch_size_per_gpu`).
            rank: data-parallel rank.
            world: data-parallel size.
            sampler: selects this rank's indices instead of the default.
            shuffle: draw a new order in each epoch, the same on all ranks.
            part: function that returns this rank's part of a batch; None: the whole batch.
            loader: further arguments of torch's DataLoader, such as collate_fn and drop_last.

        Raises:
            DataError: the object is not a dataset, is empty, or too small for one batch; or `sampler` or collate_fn is
                unsuitable.
        """
        if isinstance(dataset, DataLoader):
            raise DataError("training_data is a DataLoader; pass its dataset, or loop over the DataLoader yourself")
        self.batch_size, self.world, self._part = batch_size, world, part
        self.epoch = 0  # epoch of the next pass
        self._running, self._taken = 0, 0  # epoch of the current pass, number of its batches so far
        self._resume_at, self._loads = 0, 0  # position at which the next pass begins, number of loaded states
        collate = loader.get("collate_fn")
        if collate is not None and not callable(collate):
            raise DataError(f"collate_fn is a {type(collate).__name__}; pass a function that makes a batch of samples")
        drop_last = bool(loader.get("drop_last", False))
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
            raise DataError(
                f"training_data is a {type(dataset).__name__}, which has no length; pass a map-style dataset, a list "
                f"or a torch IterableDataset"
            )
        if isinstance(dataset, IterableDataset):
            self._position = dataset = self._split(dataset, rank, world, sampler)
        elif sampler is None:
            if not len(dataset):  # type: ignore[arg-type]
                raise DataError("training_data has no samples")
            whole = DistributedSampler(dataset, world, rank, shuffle=shuffle, drop_last=drop_last)
            self._position = sampler = _FromHere(whole)
        else:
            self._position = sampler = _Skipping(sampler, world)
        self.loader = DataLoader(dataset, batch_size, sampler=sampler, **loader)
        if sampler is not None and not len(self.loader):
            raise DataError(
                f"training_data has {len(dataset)} samples; with drop_last, {world} data-parallel ranks and a "  # type: ignore[arg-type]
                f"micro-batch of {batch_size} no rank gets a full batch: use a smaller micro-batch or drop_last=False"
            )

    @staticmethod
    def _split(stream: IterableDataset[Any], rank: int, world: int, sampler: object) -> _Share:
        if sampler is not None:
            raise DataError("a sampler chooses indices, but training_data is an IterableDataset, which has none")
        if world > 1:
            log_once(
                f"{type(stream).__name__} is split by position over {world} data-parallel ranks; a stream that already "
                "yields other samples on each rank should go into a DataLoader of its own"
            )
        return _Share(stream, rank, world)

    @property
    def dataset(self) -> Dataset[Any]:
        """Return the dataset (for an iterable dataset: this rank's share)."""
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines the order of samples; each later pass adds one."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch; a loaded state continues in the middle of its epoch."""
        loads = -1
        while loads != self._loads:
            loads = self._loads
            for batch in self._pass():
                yield batch
                if loads != self._loads:
                    break

    def _pass(self) -> Iterator[Any]:
        self._position.set_epoch(self.epoch)
        self._running, self._taken = self.epoch, 0
        self.epoch += 1
        self._position.start, self._resume_at = self._resume_at, 0
        # torch draws a seed for the workers when a pass begins; a continued pass has drawn it before.
        drawn = torch.get_rng_state()
        batches = iter(self.loader)
        if self._position.start:
            torch.set_rng_state(drawn)
        while True:
            with recorder.span(LOADER, "next batch"):
                batch = next(batches, _END)
            if batch is _END:
                break
            self._taken += 1
            yield batch if self._part is None else self._part(batch)
        self._position.start = self._taken = 0
        self._running = self.epoch

    def state_dict(self) -> dict[str, int]:
        """Return "epoch", the current epoch, and "seen", how many of its samples all ranks together have read."""
        begun = self._resume_at or self._position.start
        epoch = self.epoch if self._resume_at or not (self._taken or begun) else self._running
        return {"epoch": epoch, "seen": begun + self._taken * self.batch_size * self.world}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position of a `state_dict`, which may be of another number of ranks or batch size."""
        self.epoch, self._position.start = state["epoch"], state["seen"]
        if not isinstance(self.dataset, IterableDataset) and not len(self.loader):  # that epoch is over
            self.epoch, self._position.start = self.epoch + 1, 0
        self._resume_at, self._taken = self._position.start, 0
        self._loads += 1

    def rewind(self, samples: int) -> None:
        """Move the position back by `samples` samples, counted over all ranks, so that they are read again."""
        state = self.state_dict()
        epoch, seen = state["epoch"], state["seen"] - samples
        if seen < 0 and epoch and not isinstance(self.dataset, IterableDataset):
            epoch, seen = epoch - 1, seen + len(self.dataset)  # type: ignore[arg-type]
        self.load_state_dict({"epoch": epoch, "seen": max(0, seen)})


class RepeatingLoader:
    """An endless iterator that restarts a loader whenever it ends.

    Example:
        batches = RepeatingLoader(loader)
        batch = next(batches)
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Start the first pass over `loader`, an iterable that can be iterated repeatedly."""
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        """Return the next batch; raises DataError if the restarted loader yields nothing."""
        for batch in self.data_iter:
            return batch
        self.data_iter = iter(self.loader)
        for batch in self.data_iter:
            return batch
        raise DataError(
            f"RepeatingLoader: {type(self.loader).__name__} gives no batch when started again; it is empty, or an "
            "iterator or generator that can be read once (pass the object that makes it)"
        )


def tokens_in(inputs: Iterable[Any]) -> int:
    """Return the size of the first tensor of integers with two or more dims, also in dicts; 0 if there is none."""
    for value in inputs:
        if isinstance(value, dict):
            tokens = tokens_in(value.values())
            if tokens:
                return tokens
        elif isinstance(value, torch.Tensor) and value.dim() > 1:
            if not value.dtype.is_floating_point and value.dtype != torch.bool:
                return value.numel()
    return 0
