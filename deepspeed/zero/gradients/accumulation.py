"""Gradient accumulation: state between two optimizer updates, and the comparison of this state over ranks.

A window is the sequence of micro-batches between two optimizer updates. The engine or the pipeline schedule owns one
`AccumulationWindow` and reports each backward pass and the end of each micro-batch to it. From the window, the gradient
reducer (`zero/gradients/reducer`) reads the factor of a gradient and whether to reduce it now, and the optimizer reads
the factor on the sum.

[Note: agreement] Counts, accumulation boundary, loss weighting, loss scale and hyperparameters are set on each rank
separately. `Reducer.finish` exchanges them in the message that it sends anyway. If they differ, every rank raises the
same `UsageError`, drops the gradients of the window, and leaves the parameters unchanged.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable

from deepspeed.errors import ArgumentError, UsageError


class Way(enum.IntFlag):
    """Weighting of losses in an accumulated gradient; flags combine the weightings of several backward passes."""

    NONE = 0
    MEAN = 1  # mean over micro-batches and ranks: the plain backward
    SUM = 2  # mean over ranks, sum over micro-batches (`scale_wrt_gas=False`)
    ITEMS = 4  # sum divided by the global number of items, such as tokens (`num_items`)
    SAMPLES = 8  # mean over samples, without padding samples (`engine.loop`)

    def describe(self) -> str:
        return " with ".join(words for way, words in _WORDS.items() if self & way) or "no backward"

    @property
    def mixture(self) -> str:
        """Return a description of the weightings if they cannot be combined in one update, else ""."""
        counting = int(self) & _BY_COUNT
        alone = counting == int(self) and counting != _BY_COUNT
        return self.describe() if counting and not alone else ""


_BY_COUNT = int(Way.ITEMS | Way.SAMPLES)  # `step` divides by the global count
_WORDS = {
    Way.MEAN: "plain backward",
    Way.SUM: "backward(scale_wrt_gas=False)",
    Way.ITEMS: "backward(num_items=…)",
    Way.SAMPLES: "engine.loop",
}


class Purpose(enum.IntEnum):
    """Call for which the ranks synchronize their gradients."""

    STEP = 0
    FLUSH = 1
    ZERO_GRAD = 2
    READ = 3
    WRITE = 4
    REDUCE = 5


_CALLS = ("step()", "flush()", "zero_grad()", "a read of a gradient", "a change of a gradient", "allreduce_gradients()")


@dataclass(frozen=True)
class Agreed:
    """Values on which all ranks agree before an update; result of `Reducer.finish`.

    Args:
        items: number of items or samples, summed over the ranks; the divisor of the gradient if `ways` counts them.
        ways: union of the weightings that the ranks used.
        known: whether all ranks have the global gradient norm of the current gradients.
    """

    items: float
    ways: Way
    known: bool = False

    @classmethod
    def of(cls, table: Sequence[Sequence[float]]) -> Agreed:
        """Combine the rows of all ranks, as returned by `AccumulationWindow.row`."""
        ways = 0
        for row in table:
            ways |= int(row[1])
        return cls(sum(row[0] for row in table), Way(ways), all(row[_COMPARED] for row in table))


@dataclass(frozen=True)
class _BackwardPass:
    """Backward pass and the weighting of its loss."""

    way: Way
    by_window: bool
    scaled: bool
    task: int | None = None  # id of autograd's graph task to which it applies; None: all until it is closed


_BARE = _BackwardPass(Way.MEAN, True, False)  # loss.backward(), called by the user


class AccumulationWindow:
    """State of gradient accumulation between two updates.

    Args:
        steps: micro-batches per update (`gradient_accumulation_steps`).
        micro: samples per rank and micro-batch.
        ranks: divisor of the gradient sum over the data- and sequence-parallel ranks: their number, or, if gradients
            are to be summed over data-parallel ranks, only the number of ranks per sequence.
        scaler: loss scaler (`optim.loss_scale.LossScaler`); None if losses are not scaled.
        refuses_bare: error message for gradients of a plain `loss.backward()`; "" to allow it.
    """

    def __init__(self, steps: int, micro: int, ranks: int, scaler: Any = None, refuses_bare: str = "") -> None:
        self.steps, self.micro, self.ranks, self.scaler = steps, micro, ranks, scaler
        self.seen = 0  # micro-batches that have ended
        self.refuses_bare = refuses_bare
        self.forced: bool | None = None  # the boundary, if set explicitly
        self.holding = False  # gradients are not to be reduced (`no_sync`)
        self.flushing = False  # the next update is of an incomplete window
        self.samples: float | None = None  # samples of the micro-batch without padding, if `engine.loop` counts them
        self._rates: Callable[[], list[float]] = list  # hyperparameters of the optimizer, see `set_rates`
        self.leaf_writes = 0  # in-place changes of the optimizer's own parameters between updates
        self.ways, self.items = 0, 0.0  # plain numbers for speed: read for every gradient
        self._travel: float | None = None
        self.deferred = steps > 1  # several micro-batches are summed before the reduction
        self.revision = 0  # changes with each `refresh`; values derived from the window may be cached until then
        self._pass = _BARE
        self.refresh()

    # -- factors of gradients -----------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor by which losses are multiplied (1 without a scaler)."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    @property
    def boundary(self) -> bool:
        """Return whether the current micro-batch is the last one before an update."""
        return (self.seen + 1) % self.steps == 0 if self.forced is None else self.forced

    def refresh(self) -> None:
        """Recompute the cached values (`factor`, `way`, `reduce_now`, …) after the state has changed."""
        self.revision += 1
        self.reduce_now = self.boundary and not self.holding
        self.deferred |= not self.reduce_now
        self.weight = None if self.samples is None else self.samples / self.micro
        self.factor = self._factor(self._pass)
        self.way = int(Way.SAMPLES if self.samples is not None else self._pass.way)
        self.unscaled = self.scaler is not None and not self._pass.scaled
        if self._pass is not _BARE:
            self._travel = self.factor

    def _factor(self, of: _BackwardPass) -> float:
        """Return the factor by which gradients of the backward pass `of` are multiplied when they are accumulated."""
        scale = self.loss_scale if of.scaled else 1.0
        if self.samples is not None:
            return self.micro / scale
        if of.way is Way.ITEMS:
            return 1.0 / scale  # `step` divides by the global number of items, which is not known before
        return 1.0 / (self.ranks * (self.steps if of.by_window else 1) * scale)

    @property
    def travel_factor(self) -> float:
        """Return the factor of the last scaled backward pass (default: a mean), for casts to a communication dtype."""
        return self._factor(_BackwardPass(Way.MEAN, True, True)) if self._travel is None else self._travel

    @contextlib.contextmanager
    def backward_pass(self, way: Way = Way.MEAN, *, by_window: bool = True) -> Iterator[None]:
        """Set the weighting of gradients that arrive in the `with` block; their loss must include the loss scale.

        Args:
            way: weighting of the loss.
            by_window: divide the gradients by the number of micro-batches per update.
        """
        before, self._pass = self._pass, _BackwardPass(way, by_window, True)
        self.refresh()
        try:
            yield
        finally:
            self._pass = before
            self.refresh()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the fp32 product of `loss` and the loss scale, on which the user calls `backward`.

        Gradients of that backward pass are divided by the loss scale when they are accumulated. Inside `backward_pass`,
        where losses are scaled too, it raises UsageError.
        """
        scaled_loss = loss.float() * self.loss_scale

        def opened(_grad: torch.Tensor) -> None:
            if self._pass is not _BARE and self._pass.task is None:
                raise UsageError(
                    "engine.backward(engine.scale(loss)) scales the loss twice: call engine.backward(loss), or "
                    "engine.scale(loss).backward()"
                )
            self._pass = _BackwardPass(Way.MEAN, True, True, torch._C._current_graph_task_id())
            self.refresh()
            Variable._execution_engine.queue_callback(self._close)

        scaled_loss.register_hook(opened)
        return scaled_loss

    def _close(self) -> None:
        self._pass = _BARE
        self.refresh()

    def entering(self) -> None:
        """Record the weighting of a gradient that is about to be accumulated.

        Raises:
            UsageError: the gradient is from a plain `loss.backward()`, which `refuses_bare` forbids.
        """
        task = self._pass.task
        if task is not None and task != torch._C._current_graph_task_id():  # that pass was ended by an exception
            self._close()
        if self.refuses_bare and self._pass is _BARE:
            raise UsageError(self.refuses_bare)
        self.ways |= self.way

    # -- counting -----------------------------------------------------------------------------------------------------

    def count(self, way: Way, items: float | None = None) -> None:
        """Record a backward pass.

        Args:
            way: weighting of its loss.
            items: number of items or samples on this rank, with `ITEMS` and `SAMPLES`; added to the divisor.

        Raises:
            ArgumentError: `items` is not a number, is negative, or is not finite.
            UsageError: the weighting cannot be combined with an earlier one since the last update.
        """
        if items is not None and not (isinstance(items, (int, float)) and 0 <= items < math.inf):
            raise ArgumentError(f"num_items is this rank's count of items, a number of 0 or more; got {items!r}")
        if mixture := Way(self.ways | int(way)).mixture:
            raise UsageError(f"a window mixes {mixture}; use one of them throughout")
        self.ways |= int(way)
        self.items += items or 0.0

    def end_micro_batch(self) -> bool:
        """Count a micro-batch as finished; returns whether the optimizer update follows."""
        boundary = self.boundary
        self.seen += 1
        self._pass, self.samples = _BARE, None
        if not boundary:
            self.refresh()
        return boundary

    def forget(self) -> None:
        """Reset weightings and item counts to those of a current `weigh`; keep the number of finished micro-batches."""
        self.ways, self.items, self._travel = 0, 0.0, None
        if self.samples is not None:
            self.ways, self.items = int(Way.SAMPLES), self.samples
        self.deferred = self.steps > 1
        self.refresh()

    def resume(self, seen: int, ways: int, items: float) -> None:
        """Restore the state of gradient accumulation from a checkpoint.

        Args:
            seen: number of finished micro-batches.
            ways: flags of `Way` that were used.
            items: number of items or samples on this rank.
        """
        self.seen, self.ways, self.items = seen, ways, items
        self.refresh()

    def restart(self) -> None:
        self.seen, self.samples = 0, None
        self.forget()

    def hold(self, holding: bool) -> None:
        """Start (True) or stop (False) deferring the reduction of gradients (`no_sync`)."""
        self.holding = holding
        self.refresh()

    def force(self, boundary: bool | None) -> None:
        """Set explicitly whether an update follows the current micro-batch; None: decide by counting."""
        self.forced = boundary
        self.refresh()

    @contextlib.contextmanager
    def flush(self) -> Iterator[None]:
        """Return a context in which an update may follow fewer micro-batches than `steps`."""
        self.flushing = True
        try:
            yield
        finally:
            self.flushing = False

    def weigh(self, samples: float | None) -> None:
        """Weight the next micro-batch by its number of samples.

        Args:
            samples: number of samples on this rank, without padding samples; None: equal weights of micro-batches.

        Raises:
            UsageError: there are gradients of another weighting since the last update.
        """
        if samples is not None:
            self.count(Way.SAMPLES, samples)
        self.samples = samples
        self.refresh()

    def set_scaler(self, scaler: Any) -> None:
        self.scaler = scaler
        self.refresh()

    def set_rates(self, rates: Callable[[], list[float]]) -> None:
        """Set the function that returns this rank's hyperparameters, which ranks compare before each update."""
        self._rates = rates

    def set_micro(self, micro: int) -> None:
        self.micro = micro
        self.refresh()

    def set_steps(self, steps: int) -> None:
        self.steps = steps
        self.deferred = steps > 1
        self.refresh()

    # -- agreement ----------------------------------------------------------------------------------------------------

    @property
    def update(self) -> Purpose:
        return Purpose.FLUSH if self.flushing else Purpose.STEP

    def row(self, purpose: Purpose, detail: int, edits: int, *, rates: bool = True, known: bool = False) -> list[float]:
        """Return the numbers that this rank exchanges; see [Note: agreement].

        Args:
            purpose: call for which ranks synchronize.
            detail: index of the parameter whose gradient is read or written; else 0.
            edits: number of gradients that the user has changed in place since the last update.
            rates: include the hyperparameters, before an update.
            known: whether this rank has the global norm of the current gradients.
        """
        rates_row = tuple(self._rates()) if rates and purpose in (Purpose.STEP, Purpose.FLUSH) else ()
        own = (self.items, self.ways, purpose, detail, self.seen, self.steps, self.micro, self.loss_scale, edits)
        return [*map(float, own), float(hash(rates_row) % (1 << 52)), float(self.leaf_writes), float(known)]

    def rescale(self, agreed: Agreed) -> float:
        """Return the factor on the accumulated gradient sum that makes it the gradient of the update."""
        if agreed.ways & _BY_COUNT:
            return 1.0 / agreed.items if agreed.items else 1.0  # right for an incomplete window as well
        return self.steps / self.seen if self.flushing and not agreed.ways & Way.SUM else 1.0


_FIELDS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("is at", lambda value: _CALLS[int(value)]),
    ("means the parameter at place", lambda value: f"{value:g}"),
    ("has ended micro-batches:", lambda value: f"{value:g}"),
    ("has accumulation steps:", lambda value: f"{value:g}"),
    ("has samples per micro-batch:", lambda value: f"{value:g}"),
    ("has the loss scale", lambda value: f"{value:g}"),
    ("changed gradients in place:", lambda value: f"{value:g}"),
    ("has learning rates or other hyperparameters of the print", lambda value: f"{int(value):x}"),
    ("wrote to the optimizer's own parameters outside of step():", lambda value: f"{value:g}"),
)
_COMPARED = 2 + len(_FIELDS)  # numbers in a row, without the last one


def disagreement(table: Sequence[Sequence[float]]) -> str | None:
    """Compare the rows of all ranks (`AccumulationWindow.row`).

    Args:
        table: one row per rank, in rank order.

    Returns:
        Description of the differences for an error message; None if there are none.
    """
    rows = [row[2:_COMPARED] for row in table]
    if any(row != rows[0] for row in rows):
        return "; ".join(
            ", ".join(f"rank {rank} {what} {say(value)}" for rank, value in enumerate(values))
            for (what, say), values in zip(_FIELDS, zip(*rows, strict=True), strict=True)
            if len(set(values)) > 1
        )
    ways = Agreed.of(table).ways
    if mixture := ways.mixture:
        ways_by_rank = ", ".join(f"rank {r}: {Way(int(row[1])).describe()}" for r, row in enumerate(table))
        return f"the window mixes {mixture} ({ways_by_rank})"
    if rows[0][0] == Purpose.FLUSH and ways & Way.MEAN and ways & Way.SUM:
        return "flush() of a window that mixes plain backward with scale_wrt_gas=False: its mean is not defined"
    return None
