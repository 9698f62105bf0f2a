"""Batches of about equal numbers of tokens instead of equal numbers of samples, and learning rates by batch size."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

from deepspeed.data.index_lists import Array, IndexLists, checked_lengths, reordered, stable_order
from deepspeed.errors import ArgumentError, DataError, NotAvailableError
from deepspeed.foundation.log import log_rank0, warn_once

Order = Literal["dataloader", "random", "seqlen", "bucketed"]
ORDERS = ("dataloader", "random", "seqlen", "bucketed")
SCALINGS = ("linear", "sqrt", "none")


@dataclass(frozen=True)
class TokenBatches(IndexLists):
    """Micro-batches of samples, by the samples' indices; see `token_batches`.

    Attributes:
        fewest: fewest samples of a micro-batch.
    """

    fewest: int = 1

    @property
    def longest(self) -> Array:
        """Return the longest length in each micro-batch: the number of tokens to which its samples are padded."""
        return np.maximum.reduceat(self.lengths[self.ids], self.bounds[:-1]) if len(self) else np.empty(0, np.int64)

    def evened(self, multiple: int, drop_last: bool = False) -> TokenBatches:
        """Return micro-batches whose number is a multiple, for equal steps on all ranks; the largest are halved for it.

        Args:
            multiple: data-parallel ranks times micro-batches of each rank in a step.
            drop_last: leave out the last micro-batches if there are too few samples to halve.

        Raises:
            DataError: there are too few samples.
        """
        missing = -len(self) % multiple
        bounds = self.bounds.tolist()
        largest = [(start - stop, start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        heapq.heapify(largest)
        cuts: list[int] = []
        while len(cuts) < missing and largest and -largest[0][0] >= 2 * self.fewest:
            _, start, stop = heapq.heappop(largest)
            middle = (start + stop) // 2
            cuts.append(middle)
            heapq.heappush(largest, (start - middle, start, middle))
            heapq.heappush(largest, (middle - stop, middle, stop))
        if len(cuts) == missing:
            return replace(self, bounds=np.array(sorted([*bounds, *cuts]), np.int64))
        if not drop_last:
            raise DataError(
                f"{len(self)} micro-batches of {len(self.ids)} samples cannot become a multiple of {multiple}, with at "
                f"least {self.fewest} samples each: use a smaller budget or fewer micro-batches in a step, or leave "
                "the rest out (drop_last=True)"
            )
        count = len(self) // multiple * multiple
        end = bounds[count]
        rest = np.sort(np.concatenate([self.left_out, self.ids[end:]]))
        return replace(self, ids=self.ids[:end], bounds=self.bounds[: count + 1], left_out=rest)

    def between(self, start: int, stop: int) -> TokenBatches:
        """Return the micro-batches from number `start` up to `stop`."""
        ids, bounds = reordered(self.ids, self.bounds, np.arange(start, stop))
        return replace(self, ids=ids, bounds=bounds)

    def followed_by(self, other: TokenBatches) -> TokenBatches:
        """Return these micro-batches and then others of the same samples."""
        bounds = np.concatenate([self.bounds, other.bounds[1:] + len(self.ids)])
        return replace(other, ids=np.concatenate([self.ids, other.ids]), bounds=bounds)

    def of_rank(self, rank: int, world: int) -> TokenBatches:
        """Return every `world`-th micro-batch, from `rank` on."""
        ids, bounds = reordered(self.ids, self.bounds, np.arange(rank, len(self), world))
        return replace(self, ids=ids, bounds=bounds)


def token_batches(
    lengths: Any,
    max_tokens: int,
    order: Order = "dataloader",
    seed: int | Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    padded: bool = False,
) -> TokenBatches:
    """Divide samples into micro-batches of at most `max_tokens`, in time that grows linearly with the samples.

    Samples follow each other in the order, and a micro-batch ends before the sample that would exceed the budget.

    Args:
        lengths: number of tokens of each sample.
        max_tokens: most tokens of a micro-batch.
        order: "dataloader": as they are; "random"; "seqlen": from short to long; "bucketed": micro-batches of samples
            of near lengths, in a random order.
        seed: seed, or [seed, epoch], of what is random.
        min_batch_size: fewest samples of a micro-batch; smaller ones are left out.
        max_batch_size: most samples of a micro-batch; None: any number.
        padded: whether padding counts, so that the longest sample times the number of samples stays in the budget.

    Returns:
        Micro-batches. `left_out` has the samples over the budget and those of too small micro-batches.

    Raises:
        ArgumentError: an argument is out of range or unknown, or an order is random without a seed.
        DataError: a length is below 1.
    """
    if order not in ORDERS:
        raise ArgumentError(f"order={order!r}; orders are {', '.join(ORDERS)}")
    if order in ("random", "bucketed") and seed is None:
        raise ArgumentError(f"order={order!r} needs a seed, so that a run can be repeated and all ranks agree")
    if max_tokens < 1 or min_batch_size < 1 or (max_batch_size is not None and max_batch_size < min_batch_size):
        raise ArgumentError(
            f"max_tokens {max_tokens} and min_batch_size {min_batch_size} have to be at least 1, and max_batch_size "
            f"{max_batch_size} not below min_batch_size"
        )
    sizes = checked_lengths(lengths)
    draw = np.random.default_rng(seed)
    ids = np.flatnonzero(sizes <= max_tokens)
    if order in ("random", "bucketed"):
        ids = draw.permutation(ids)
    if order in ("seqlen", "bucketed"):
        ids = ids[stable_order(sizes[ids])]
    bounds = np.array(_cuts(sizes[ids].tolist(), max_tokens, max_batch_size or len(ids), padded), np.int64)
    sequence = np.flatnonzero(np.diff(bounds) >= min_batch_size)
    if order == "bucketed":
        sequence = draw.permutation(sequence)
    ids, bounds = reordered(ids, bounds, sequence)
    outside = np.ones(len(sizes), bool)
    outside[ids] = False
    return TokenBatches(ids, bounds, sizes, np.flatnonzero(outside), min_batch_size)


def _cuts(sizes: list[int], max_tokens: int, most: int, padded: bool) -> list[int]:
    """Return bounds of micro-batches that are as large as the budget allows."""
    bounds, total, longest, count = [0], 0, 0, 0
    for position, size in enumerate(sizes):
        cost = (count + 1) * max(longest, size) if padded else total + size
        if count and (cost > max_tokens or count == most):
            bounds.append(position)
            total = longest = count = 0
        total, longest, count = total + size, max(longest, size), count + 1
    return [*bounds, len(sizes)] if sizes else bounds


class TokenBatchSampler(Sampler[list[int]]):
    """Batch sampler of one rank: `DataLoader(dataset, batch_sampler=TokenBatchSampler(…))`.

    All ranks have equally many micro-batches; with "random" and "bucketed", each epoch has a new order. Gradients of
    micro-batches with different numbers of items are right if the items are counted: `engine.backward(loss_sum,
    num_items=…)`.

    Args:
        lengths: number of tokens of each sample.
        max_tokens: most tokens of a micro-batch.
        rank: data-parallel rank.
        world: number of data-parallel ranks.
        accumulation: micro-batches of each rank in an optimizer step.
        order: as in `token_batches`.
        seed: seed; each epoch draws its own order.
        options: further arguments of `token_batches`.

    Raises:
        ArgumentError: the options, or `rank` and `world`, are out of range.
        DataError: a length is no integer of at least 1, no sample fits, or there are too few samples for the
            micro-batches of one step on all ranks.
    """

    def __init__(
        self,
        lengths: Any,
        max_tokens: int,
        rank: int = 0,
        world: int = 1,
        accumulation: int = 1,
        order: Order = "bucketed",
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not 0 <= rank < world or accumulation < 1:
            raise ArgumentError(f"rank {rank} of {world} with {accumulation} micro-batches in a step")
        self.lengths, self._budget = checked_lengths(lengths), max_tokens
        self._rank, self.world, self._multiple = rank, world, world * accumulation
        self._order: Order = order
        self._seed, self._options = seed, options
        # an epoch, and the parts of it that were formed for other numbers of ranks; an epoch and its batches' sizes
        self._changes: tuple[int, list[tuple[int, int]]] = (-1, [])
        self._sized: tuple[int, Array] = (-1, np.empty(0, np.int64))
        self.set_epoch(0)
        if not len(self.batches):
            raise DataError(f"none of {len(self.lengths)} samples is in a micro-batch of {max_tokens} tokens")
        if len(self.batches.left_out):
            warn_once(f"{len(self.batches.left_out)} of {len(self.lengths)} samples are in no batch of tokens")

    def set_epoch(self, epoch: int) -> None:
        """Form the micro-batches of an epoch, the same on all ranks."""
        if self._changes[0] != epoch:
            self._changes = epoch, [(0, self._multiple)]
        self.epoch, self.batches = epoch, self._batches(epoch)

    def _batches(self, epoch: int) -> TokenBatches:
        seed: Any = [self._seed, epoch]
        batches = token_batches(self.lengths, self._budget, self._order, seed, **self._options)
        for start, multiple in self.changes_of(epoch):
            rest = batches.between(start, len(batches)).evened(multiple)
            batches = batches.between(0, start).followed_by(rest)
        return batches

    def changes_of(self, epoch: int) -> list[tuple[int, int]]:
        """Return (first micro-batch, ranks × accumulation) of the parts of an epoch, of which a resume begins one."""
        return self._changes[1] if epoch == self._changes[0] else [(0, self._multiple)]

    def go_on(self, epoch: int, seen: int, changes: Sequence[Sequence[int]]) -> None:
        """Continue an epoch of which `seen` micro-batches were read, also with another ranks × accumulation.

        Args:
            epoch: the epoch.
            seen: number of its micro-batches that all ranks together have read.
            changes: `changes_of` the sampler that read them.

        Raises:
            DataError: too few samples are left for a micro-batch on each rank.
        """
        parts = [(int(start), int(multiple)) for start, multiple in changes]
        if parts[-1][1] != self._multiple:
            parts = [part for part in parts if part[0] < seen] + [(seen, self._multiple)]
        self._changes, self._sized = (epoch, parts), (-1, np.empty(0, np.int64))
        self.set_epoch(epoch)

    def batches_of(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch, over all ranks."""
        return len(self.batches if epoch == self.epoch else self._batches(epoch))

    @property
    def step_sizes(self) -> Array:
        """Return the number of samples of each optimizer step of the epoch's last part, over all ranks."""
        start = self.changes_of(self.epoch)[-1][0]
        return self.batches.counts[start:].reshape(-1, self._multiple).sum(axis=1)

    def size_from(self, epoch: int, seen: int) -> int:
        """Return the number of samples, over all ranks, of the step that has micro-batch number `seen` of an epoch.

        After the last one, the first step of the next epoch follows.
        """
        if epoch != self._sized[0]:
            self._sized = epoch, (self.batches if epoch == self.epoch else self._batches(epoch)).counts
        counts = self._sized[1]
        if seen >= len(counts):
            return self.size_from(epoch + 1, 0)
        start = max(first for first, _ in self.changes_of(epoch) if first <= seen)
        start += (seen - start) // self._multiple * self._multiple
        return int(counts[start : start + self._multiple].sum())

    def __len__(self) -> int:
        return len(self.batches) // self.world

    def from_position(self, start: int) -> Iterator[list[int]]:
        """Yield this rank's micro-batches after the first `start` of all ranks."""
        for ids in self.batches.between(start, len(self.batches)).of_rank(self._rank, self.world):
            yield ids.tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return self.from_position(0)


def batch_by_seqlens(
    seqlens: Any,
    max_tokens: int,
    sequence_ids_per_mb: Any = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: Order = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Divide samples into micro-batches and batches by upstream's interface; see `token_batches`.

    So that each batch is whole, the largest micro-batches are halved. Left out, with a warning, are samples over the
    budget, micro-batches under `min_batch_size`, and the last micro-batches if there are too few samples to halve.

    Args:
        seqlens: number of tokens of each sample.
        max_tokens: most tokens of a micro-batch, without padding.
        sequence_ids_per_mb: not available.
        min_batch_size: fewest samples of a micro-batch.
        max_batch_size: most samples of a micro-batch.
        sequence_picking_order: "dataloader", "random", "seqlen" or "bucketed".
        effective_batch_size: micro-batches of a batch.
        required_microbatches_of_same_size: not available.
        verbose: log the number of micro-batches.
        seed: seed of a random order; None: 0.

    Returns:
        Micro-batches as (batch, indices), samples of each batch, longest length in each batch.

    Raises:
        NotAvailableError: an argument that is not available is given.
        ArgumentError: an argument is out of range.
        DataError: a length is no integer of at least 1.
    """
    if sequence_ids_per_mb is not None or required_microbatches_of_same_size:
        name = "sequence_ids_per_mb" if sequence_ids_per_mb is not None else "required_microbatches_of_same_size"
        raise NotAvailableError(f"batch_by_seqlens: {name} is not available yet")
    if effective_batch_size < 1:
        raise ArgumentError(f"effective_batch_size {effective_batch_size} has to be at least 1")
    order, draw = sequence_picking_order, seed or 0
    batches = token_batches(seqlens, max_tokens, order, draw, min_batch_size, max_batch_size)
    batches = batches.evened(effective_batch_size, drop_last=True)
    if len(batches.left_out):
        warn_once(
            f"{len(batches.left_out)} of {len(batches.lengths)} samples are in no batch: over {max_tokens} tokens, in "
            f"micro-batches of fewer than {min_batch_size}, or in an incomplete batch of {effective_batch_size}"
        )
    starts = np.arange(0, len(batches), effective_batch_size)
    sizes = np.add.reduceat(batches.counts, starts).tolist() if len(batches) else []
    longest = np.maximum.reduceat(batches.longest, starts).tolist() if len(batches) else []
    if verbose:
        log_rank0(f"{len(batches)} micro-batches in {len(sizes)} batches of {sum(sizes)} samples")
    return [(number // effective_batch_size, ids.tolist()) for number, ids in enumerate(batches)], sizes, longest


def scale_lr(base_batch_size: float, batch_size: float, base_lr: float = 1, method: str | None = "linear") -> float:
    """Return the learning rate of a batch of another size than that for which a rate was chosen.

    Args:
        base_batch_size: number of samples for which `base_lr` was chosen.
        batch_size: number of samples of the batch.
        base_lr: learning rate.
        method: "linear" (arXiv:1706.02677), "sqrt" (arXiv:1404.5997), "none" or None.

    Raises:
        ArgumentError: a size is not positive, or the method is unknown.
    """
    if base_batch_size <= 0 or batch_size <= 0:
        raise ArgumentError(f"batch sizes {base_batch_size} and {batch_size} have to be positive")
    if (method or "none") not in SCALINGS:
        raise ArgumentError(f"method={method!r}; rules are {', '.join(SCALINGS)}")
    ratio = batch_size / base_batch_size
    return base_lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[method or "none"]


class VariableBatchSizeLR:
    """Scheduler around another one: its rates, scaled by the size of the batch of each step.

    Args:
        lr_scheduler: scheduler of the rates for `base_batch_size`.
        base_batch_size: number of samples for which its rates were chosen.
        batch_sizes: number of samples of each step; after the last, the first follows. Or a function that returns the
            number of the next step.
        dataloader: has no effect; upstream's argument.
        lr_scaling_method: as in `scale_lr`.
        last_epoch: number of steps before the first, less one.
        verbose: log each step's rates.

    Raises:
        ArgumentError: there are no batch sizes, or a size or the method is out of range.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int] | Callable[[], int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not callable(batch_sizes) and not len(batch_sizes):
            raise ArgumentError("batch_sizes is empty; it needs the number of samples of each step")
        for size in {base_batch_size} if callable(batch_sizes) else {int(size) for size in batch_sizes}:
            scale_lr(base_batch_size, size, method=lr_scaling_method)
        self.base_lr_scheduler, self.optimizer = lr_scheduler, lr_scheduler.optimizer
        self.base_batch_size, self.lr_scaling_method = base_batch_size, lr_scaling_method
        self.batch_sizes = batch_sizes if callable(batch_sizes) else [int(size) for size in batch_sizes]
        self.verbose = verbose
        self.last_epoch = last_epoch + 1
        self._scale()

    @property
    def base_lrs(self) -> list[float]:
        """Return the rates before they are scaled."""
        return self._plain

    def _scale(self) -> None:
        self._plain = [float(group["lr"]) for group in self.optimizer.param_groups]
        sizes = self.batch_sizes
        size = sizes() if callable(sizes) else sizes[self.last_epoch % len(sizes)]
        self._set([scale_lr(self.base_batch_size, size, rate, self.lr_scaling_method) for rate in self._plain])
        if self.verbose:
            log_rank0(f"step {self.last_epoch}: batch of {size} samples, learning rates {self.get_last_lr()}")

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def rescale(self) -> None:
        """Scale the rates for the next step once more, whose batch may be another one than at the last `step`."""
        self._set(self._plain)
        self._scale()

    def unscaled(self) -> Any:
        """Return the other scheduler, with its rates as they were before they were scaled."""
        self._set(self._plain)
        return self.base_lr_scheduler

    def step(self, epoch: int | None = None) -> None:
        """Advance the other scheduler and scale its rates for the following batch; `epoch` sets the number of steps."""
        self._set(self._plain)  # torch's schedulers compute rates from the last ones
        self.base_lr_scheduler.step(*([] if epoch is None else [epoch]))
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._scale()

    def get_last_lr(self) -> list[float]:
        """Return the scaled rates."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """Return the scaled rates."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both schedulers."""
        return {
            "base_lr_scheduler": self.base_lr_scheduler.state_dict(),
            "base_batch_size": self.base_batch_size,
            "lr_scaling_method": self.lr_scaling_method,
            "batch_sizes": None if callable(self.batch_sizes) else self.batch_sizes,
            "base_lrs": self._plain,
            "last_epoch": self.last_epoch,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of both schedulers, and set the scaled rates."""
        self.base_lr_scheduler.load_state_dict(state_dict["base_lr_scheduler"])
        self.base_batch_size = state_dict["base_batch_size"]
        self.lr_scaling_method = state_dict["lr_scaling_method"]
        if not callable(self.batch_sizes):
            self.batch_sizes = list(state_dict["batch_sizes"])
        self.last_epoch = state_dict["last_epoch"]
        self._set(state_dict["base_lrs"])
        self._scale()
