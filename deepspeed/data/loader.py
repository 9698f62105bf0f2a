"""Data loader of `training_data`: each data-parallel rank reads its part of every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from deepspeed.comm.process_groups.mesh import DATA, current_mesh, ranks_started
from deepspeed.data.curriculum_sampler import CurriculumSampler
from deepspeed.data.dynamic_batches import TokenBatchSampler
from deepspeed.data.positions import (
    LastBatch,
    OrderedPosition,
    Position,
    SkippingPosition,
    StreamPosition,
    TokenBatchPosition,
)
from deepspeed.data.sample_order import EpochOrder, SampleOrder
from deepspeed.errors import ArgumentError, DataError
from deepspeed.foundation.log import log_once, log_rank0
from deepspeed.foundation.spans import LOADER, recorder

_END = object()


class DeepSpeedDataLoader:
    """A torch DataLoader over this rank's share of a dataset, with a position that a checkpoint keeps.

    The position is what was handed out, so it does not depend on the loader's processes, and it counts the samples of
    all ranks, so a run goes on from it with another number of ranks. A map-style dataset is read in the order of
    torch's DistributedSampler, a `Mixture` in its own; every rank gets equally many samples, by repeating a few (with
    `drop_last`: dropping a few, with `carry_last`: filling the last batch from the next epoch, so that every sample is
    used once in each epoch). An iterable dataset is split by position by one process, and its remainder is dropped or
    carried.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int | None = None,
        world: int | None = None,
        sampler: Sampler[Any] | None = None,
        shuffle: bool = True,
        part: Callable[[Any], Any] | None = None,
        **loader: Any,
    ) -> None:
        """Create the loader.

        Args:
            dataset: map-style dataset, or an iterable that yields the same samples on every rank.
            batch_size: samples of a micro-batch on one rank (`train_micro_batch_size_per_gpu`).
            rank: data-parallel rank; None: that of the newest engine, else of the process group.
            world: data-parallel size, as `rank`.
            sampler: selects this rank's indices (a `TokenBatchSampler`, `CurriculumSampler`: batches of them) instead
                of the default.
            shuffle: draw a new order in each epoch, the same on all ranks.
            part: function that returns this rank's part of a batch; None: the whole batch.
            loader: `seed` of the order (0), `carry_last` (False), and further arguments of torch's DataLoader, such as
                collate_fn and drop_last.

        Raises:
            DataError: the object is no dataset, is empty or too small; or `sampler` or collate_fn is unsuitable.
            ArgumentError: only one of `rank` and `world` is given, or the rank is outside of the world.
        """
        rank, world = _place(rank, world)
        self.batch_size, self.world, self._part = batch_size, world, part
        # epoch of the next pass; epoch of the current pass, number of its batches so far
        self.epoch, self._running, self._taken = 0, 0, 0
        self._resume_at, self._loads = 0, 0  # position at which the next pass begins, number of loaded states
        self._carried = False  # whether that position is where the last pass ended
        self._post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        self.before_batch: Callable[[], None] | None = None  # called before each batch is read
        seed, last = loader.pop("seed", 0), _last_batch(loader)
        _check(dataset, loader.get("collate_fn"))
        self._position: Position
        batches: dict[str, Any] = {"batch_size": batch_size}
        if isinstance(dataset, IterableDataset):
            self._position = dataset = _split(dataset, sampler, StreamPosition(dataset, rank, world, batch_size, last))
            _one_reader(dataset, loader)
        elif isinstance(sampler, (TokenBatchSampler, CurriculumSampler)):
            self._position = TokenBatchPosition(sampler) if isinstance(sampler, TokenBatchSampler) else sampler
            batches = {"batch_sampler": self._position}
            loader.pop("drop_last", None)
        elif sampler is not None:
            self._position = batches["sampler"] = SkippingPosition(sampler, world)
        else:
            order = _order_of(dataset, seed, shuffle)
            self._position = batches["sampler"] = OrderedPosition(order, rank, world, batch_size, last)
        # what one batch of this rank adds to the position
        self._unit = world if isinstance(sampler, TokenBatchSampler) else batch_size * world
        self.loader = DataLoader(dataset, **batches, **loader)
        self._check_batches()

    def _check_batches(self) -> None:
        if not isinstance(self.dataset, IterableDataset) and not len(self.loader):
            raise DataError(
                f"training_data has {len(self.dataset)} samples; with drop_last, {self.world} data-parallel ranks and "  # type: ignore[arg-type]
                f"a micro-batch of {self.batch_size} no rank gets a full batch: use a smaller micro-batch or "
                "drop_last=False"
            )

    @property
    def dataset(self) -> Dataset[Any]:
        """Return the dataset (for an iterable dataset: this rank's share)."""
        return self.loader.dataset

    @property
    def batch_sampler(self) -> Any:
        """Return torch's batch sampler of this rank, whose `batch_size` clients read."""
        return self.loader.batch_sampler

    @property
    def custom_sampler(self) -> TokenBatchSampler | CurriculumSampler | None:
        """Return the sampler that forms this rank's batches by lengths or difficulty, if there is one."""
        position = self._position
        if isinstance(position, TokenBatchPosition):
            return position.sampler
        return position if isinstance(position, CurriculumSampler) else None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines the order of samples; each later pass adds one."""
        if self._carried and epoch != self.epoch:
            self._resume_at = 0
        elif self._resume_at and epoch != self.epoch:
            log_once(
                f"set_epoch({epoch}) after a position of epoch {self.epoch} was loaded: it is used in epoch {epoch}"
            )
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole pass, also where the next one begins later (`remaining`)."""
        start, self._position.start = self._position.start, 0
        try:
            return len(self.loader)
        finally:
            self._position.start = start

    def next_step_size(self) -> int:
        """Return the number of samples, over all ranks, of the step that follows what was handed out.

        Raises:
            DataError: the loader has no batches of tokens, whose steps differ.
        """
        position = self._position
        if not isinstance(position, TokenBatchPosition):
            raise DataError("only steps of token batches differ in their number of samples")
        return position.sampler.size_from(self._running, self._seen())

    def last_indices(self) -> list[int]:
        """Return the dataset's indices in the last batch of all ranks; [] where the order is not the loader's own."""
        position, stop = self._position, self._seen()
        if not isinstance(position, OrderedPosition) or not self._taken:
            return []
        return position.between(self._running, stop - self._unit, stop)

    def remaining(self) -> int:
        """Return the number of batches from the position to the end of the pass."""
        start, self._position.start = self._position.start, self._resume_at or self._position.start
        try:
            return len(self.loader) - self._taken
        finally:
            self._position.start = start

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch; a loaded state continues in the middle of its epoch."""
        loads = -1
        while loads != self._loads:
            loads = self._loads
            resumed, batch = bool(self._resume_at), _END
            for batch in self._pass():
                yield batch
                if loads != self._loads:
                    break
            if resumed and batch is _END:  # the position was the end of a stream, whose length was not known
                loads = -1

    def _pass(self) -> Iterator[Any]:
        self._position.set_epoch(self.epoch)
        self._running, self._taken = self.epoch, 0
        self.epoch += 1
        self._position.start, self._resume_at, self._carried = self._resume_at, 0, False
        # torch draws a seed for the workers when a pass begins; a continued pass has drawn it before.
        drawn = torch.get_rng_state()
        batches = iter(self.loader)
        if self._position.start:
            torch.set_rng_state(drawn)
        while True:
            if self.before_batch is not None:
                self.before_batch()
            with recorder.span(LOADER, "next batch"):
                batch = next(batches, _END)
            if batch is _END:
                break
            self._taken += 1
            if self._post_process is not None:
                batch = self._post_process(batch, self._curriculum() or {"current_difficulties": {}})
            yield batch if self._part is None else self._part(batch)
        ahead, self._resume_at = self._position.after(self._position.start + self._taken * self._unit)
        self._carried = self._resume_at > 0
        self.epoch += ahead - 1
        self._position.start = self._taken = 0
        self._running = self.epoch

    def set_post_process(self, function: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Call `function(batch, state)` for every batch, and use what it returns.

        Without a `CurriculumSampler`, the state has only an empty "current_difficulties". With one, it is that of
        `CurriculumSampler.state_at`: "current_difficulties" by metric, "curriculum_step" and more.
        """
        self._post_process = function

    def _curriculum(self) -> dict[str, Any] | None:
        """Return the state of a `CurriculumSampler` at what was handed out."""
        position = self._position
        return position.state_at(self._seen()) if isinstance(position, CurriculumSampler) else None

    def _seen(self) -> int:
        return (self._resume_at or self._position.start) + self._taken * self._unit

    def state_dict(self) -> dict[str, Any]:
        """Return the position.

        "epoch": current epoch; "seen": how many of its samples (with batches of tokens: micro-batches) all ranks
        together have read; "samples": size of the dataset, if it has one; "curriculum": state of a
        `CurriculumSampler`.
        """
        begun = self._resume_at or self._position.start
        epoch = self.epoch if self._resume_at or not (self._taken or begun) else self._running
        state: dict[str, Any] = {"epoch": epoch, "seen": self._seen()}
        if not isinstance(self.dataset, IterableDataset):
            state["samples"] = len(self.dataset)  # type: ignore[arg-type]
        if isinstance(self._position, TokenBatchPosition):
            state |= {"unit": "micro-batches", "changes": self._position.sampler.changes_of(epoch)}
        curriculum = self._curriculum()
        return state if curriculum is None else {**state, "curriculum": curriculum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a `state_dict`, which may be of another number of ranks or batch size.

        Raises:
            DataError: one of the two loaders has batches of tokens and the other has not, or too few samples are left.
        """
        if isinstance(self._position, CurriculumSampler) and "curriculum" in state:
            self._position.load(state["curriculum"])
        unit = "micro-batches" if isinstance(self._position, TokenBatchPosition) else "samples"
        if state.get("unit", unit) != unit:
            raise DataError(
                f"the position counts {state['unit']} and this loader {unit}: batches of equal tokens and of equal "
                "numbers of samples do not go on from each other"
            )
        if isinstance(self._position, TokenBatchPosition) and "changes" in state:
            self._position.sampler.go_on(state["epoch"], state["seen"], state["changes"])
        self.epoch, self._position.start = state["epoch"], state["seen"]
        samples = None if isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]
        if samples is not None and state.get("samples", samples) != samples:
            log_rank0(
                f"the dataset has {samples} samples, and had {state['samples']} when its position was saved: the order "
                f"of epoch {state['epoch']} is another one, and goes on at position {state['seen']}"
            )
        self._position.set_epoch(self.epoch)
        if samples is not None and not len(self.loader):  # that epoch is over
            ahead, self._position.start = self._position.after(state["seen"])
            self.epoch += ahead
        self._resume_at, self._taken, self._carried = self._position.start, 0, False
        self._loads += 1

    def rewind(self, batches: int, size: int, ranks: int) -> None:
        """Move the position back, so that micro-batches are read again.

        Args:
            batches: number of micro-batches of each rank.
            size: samples of each.
            ranks: number of ranks that read them.
        """
        state = {name: value for name, value in self.state_dict().items() if name != "curriculum"}
        epoch, seen = self._position.before(state["epoch"], state["seen"], batches, size * ranks)
        self.load_state_dict({**state, "epoch": epoch, "seen": seen})


def _place(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return data-parallel rank and size; those that are None are the process's."""
    if rank is None and world is None:
        if ranks_started() == 1:
            return 0, 1
        data = current_mesh().axis(*DATA)
        return data.rank, data.size
    if rank is None or world is None or not 0 <= rank < world:
        raise ArgumentError(f"rank {rank} of world {world}: pass both, rank from 0 to world - 1, or none of them")
    return rank, world


def _order_of(dataset: Any, seed: int, shuffle: bool) -> SampleOrder:
    if not len(dataset):
        raise DataError("training_data has no samples")
    own = getattr(dataset, "sample_order", None)
    return EpochOrder(len(dataset), seed, shuffle) if own is None else own(seed, shuffle)


def _last_batch(loader: dict[str, Any]) -> LastBatch:
    """Return what happens at the end of an epoch, from arguments of a loader; `carry_last` is taken out."""
    carry = loader.pop("carry_last", False)
    if not loader.get("in_order", True):
        raise DataError("in_order=False hands out batches in any order, so that no position could be kept")
    if carry and loader.get("drop_last"):
        raise DataError("drop_last and carry_last exclude each other: the last samples are dropped or carried over")
    return "carry" if carry else "drop" if loader.get("drop_last") else "pad"


def _check(dataset: object, collate: object) -> None:
    """Raise DataError if an object is no dataset, or a collate_fn no function."""
    if isinstance(dataset, DataLoader):
        raise DataError("training_data is a DataLoader; pass its dataset, or loop over the DataLoader yourself")
    if collate is not None and not callable(collate):
        raise DataError(f"collate_fn is a {type(collate).__name__}; pass a function that makes a batch of samples")
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise DataError(
            f"training_data is a {type(dataset).__name__}, which has no length; pass a map-style dataset, a list "
            f"or a torch IterableDataset"
        )


def _split(stream: IterableDataset[Any], sampler: object, position: StreamPosition) -> StreamPosition:
    if sampler is not None:
        raise DataError("a sampler chooses indices, but training_data is an IterableDataset, which has none")
    if position.world > 1:
        log_once(
            f"{type(stream).__name__} is split by position over {position.world} data-parallel ranks; a stream that "
            "already yields other samples on each rank should go into a DataLoader of its own"
        )
    return position


def _one_reader(position: StreamPosition, loader: dict[str, Any]) -> None:
    """Let one process at most read a stream, a new one in each pass.

    Each of several would read the whole stream, and one that stays would not hear of the next epoch.
    """
    name, workers = type(position.stream).__name__, loader.get("num_workers", 0)
    if workers > 1:
        log_once(f"{name} is read by one process of the loader instead of {workers}: each would yield all samples")
        loader["num_workers"] = 1
    if loader.pop("persistent_workers", False):
        log_once(f"persistent_workers has no effect for {name}: each pass needs a new process to begin elsewhere")


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


def own_loader(loader: Any) -> DeepSpeedDataLoader | None:
    """Return the loader with a position, also inside of a RepeatingLoader; None for other loaders."""
    if isinstance(loader, RepeatingLoader):
        loader = loader.loader
    return loader if isinstance(loader, DeepSpeedDataLoader) else None
