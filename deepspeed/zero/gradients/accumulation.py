"""Gradient accumulation: the micro-batches between two updates, and the checks over ranks before one.

The driver of training (an engine, a pipeline's schedule) holds one window and reports the end of each micro-batch and
each backward pass. The window tells the gradient reducer (`zero/gradients/reducer`) the factor of a gradient and
whether it is reduced now, and the optimizer the divisor of the sum.

[Note: agreement] Every rank sets counts, boundary, ways of counting, loss scale and hyperparameters locally. They are
part of the row that `Reducer.finish` exchanges anyway. If they differ, every rank raises the same `UsageError`, the
window is dropped on all ranks, and no parameter has changed: a difference is never silent, and costs no message.
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
    """Weighting of losses in the mean gradient of a window."""

    NONE = 0
    MEAN = 1  # over micro-batches and ranks: the plain backward
    SUM = 2  # over ranks only (`scale_wrt_gas=False`)
    ITEMS = 4  # of sums over items (`num_items`)
    SAMPLES = 8  # over real samples (`engine.loop`)

    def describe(self) -> str:
        return " with ".join(words for way, words in _WORDS.items() if self & way) or "no backward"

    @property
    def mixture(self) -> str:
        """Describe weightings of a window that cannot form one mean; empty if they can."""
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
    """Reason for a synchronization of ranks."""

    STEP = 0
    FLUSH = 1
    ZERO_GRAD = 2
    READ = 3
    WRITE = 4
    REDUCE = 5


_CALLS = ("step()", "flush()", "zero_grad()", "a read of a gradient", "a change of a gradient", "allreduce_gradients()")


@dataclass(frozen=True)
class Agreed:
    """Agreement of the ranks on a window.

    Args:
        items: items or samples of all ranks.
        ways: every weighting that some rank used.
        known: whether every rank has computed the gradient norm, and nothing has changed since.
    """

    items: float
    ways: Way
    known: bool = False

    @classmethod
    def of(cls, table: Sequence[Sequence[float]]) -> Agreed:
        """Combine the rows of all ranks; see `AccumulationWindow.row`."""
        ways = 0
        for row in table:
            ways |= int(row[1])
        return cls(sum(row[0] for row in table), Way(ways), all(row[_COMPARED] for row in table))


@dataclass(frozen=True)
class _BackwardPass:
    """A backward pass that a driver has announced."""

    way: Way
    by_window: bool
    scaled: bool
    task: int | None = None  # the pass of autograd it is bound to; None: until it is closed


_BARE = _BackwardPass(Way.MEAN, True, False)  # loss.backward() of the user's own


class AccumulationWindow:
    """State of gradient accumulation between two updates.

    Args:
        steps: micro-batches per update (`gradient_accumulation_steps`).
        micro: samples per rank and micro-batch.
        ranks: divisor of the sum over ranks: their number (if gradients are summed, the number of ranks that share a
            sequence), since all of them differentiate the loss.
        scaler: loss scaler; None if losses are not scaled.
        refuses_bare: reason why every backward pass must be announced; empty if that is not required.
    """

    def __init__(self, steps: int, micro: int, ranks: int, scaler: Any = None, refuses_bare: str = "") -> None:
        self.steps, self.micro, self.ranks, self.scaler = steps, micro, ranks, scaler
        self.seen = 0  # micro-batches that have ended
        self.refuses_bare = refuses_bare
        self.forced: bool | None = None  # the boundary, where a driver decides it
        self.holding = False  # gradients are not to be reduced (`no_sync`)
        self.flushing = False  # the update that comes is that of a window that is not full
        self.samples: float | None = None  # real samples of the micro-batch, when a loop counts them
        self._rates: Callable[[], list[float]] = list  # hyperparameters of the optimizer, see `set_rates`
        self.leaf_writes = 0  # in-place changes of the optimizer's own parameters between updates
        self.ways, self.items = 0, 0.0  # plain numbers: every gradient looks at them
        self._travel: float | None = None
        self.deferred = steps > 1  # it holds micro-batches that are summed before they travel
        self.revision = 0  # changes with each `refresh`: what is formed from the above can be kept until then
        self._pass = _BARE
        self.refresh()

    # -- what a gradient is multiplied by -----------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor on the loss (1 if losses are not scaled)."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    @property
    def boundary(self) -> bool:
        """Return whether the running micro-batch is the last of its window."""
        return (self.seen + 1) % self.steps == 0 if self.forced is None else self.forced

    def refresh(self) -> None:
        """Recompute, after a change, the values that are read for each gradient."""
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
        """Return the factor of a gradient that is added to the accumulator; the only scaling rule."""
        scale = self.loss_scale if of.scaled else 1.0
        if self.samples is not None:
            return self.micro / scale
        if of.way is Way.ITEMS:
            return 1.0 / scale  # the division comes in `step`, when their global count is known
        return 1.0 / (self.ranks * (self.steps if of.by_window else 1) * scale)

    @property
    def travel_factor(self) -> float:
        """Return the factor for the cast of sums to the communication dtype: that of the last pass."""
        return self._factor(_BackwardPass(Way.MEAN, True, True)) if self._travel is None else self._travel

    @contextlib.contextmanager
    def backward_pass(self, way: Way = Way.MEAN, *, by_window: bool = True) -> Iterator[None]:
        """Declare that gradients inside the context belong to a loss that includes the loss scale."""
        before, self._pass = self._pass, _BackwardPass(way, by_window, True)
        self.refresh()
        try:
            yield
        finally:
            self._pass = before
            self.refresh()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the loss scale, for a user's own backward; the factor applies to that pass only."""
        scaled_loss = loss.float() * self.loss_scale

        def opened(_grad: torch.Tensor) -> None:
            self._pass = _BackwardPass(Way.MEAN, True, True, torch._C._current_graph_task_id())
            self.refresh()
            Variable._execution_engine.queue_callback(self._close)

        scaled_loss.register_hook(opened)
        return scaled_loss

    def _close(self) -> None:
        self._pass = _BARE
        self.refresh()

    def entering(self) -> None:
        """Check and count a gradient before it is added to the accumulator."""
        task = self._pass.task
        if task is not None and task != torch._C._current_graph_task_id():  # that pass was ended by an exception
            self._close()
        if self.refuses_bare and self._pass is _BARE:
            raise UsageError(self.refuses_bare)
        self.ways |= self.way

    # -- counting -----------------------------------------------------------------------------------------------------

    def count(self, way: Way, items: float | None = None) -> None:
        """Count a backward pass; `items` is its share of the window's divisor, with `ITEMS` and `SAMPLES`."""
        if items is not None and not (isinstance(items, (int, float)) and 0 <= items < math.inf):
            raise ArgumentError(f"num_items is this rank's count of items, a number of 0 or more; got {items!r}")
        if mixture := Way(self.ways | int(way)).mixture:
            raise UsageError(f"a window mixes {mixture}; use one of them throughout")
        self.ways |= int(way)
        self.items += items or 0.0

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; returns whether the update follows."""
        boundary = self.boundary
        self.seen += 1
        self._pass, self.samples = _BARE, None
        if not boundary:
            self.refresh()
        return boundary

    def forget(self) -> None:
        """Drop the window's counts of gradients; micro-batches stay counted."""
        self.ways, self.items, self._travel = 0, 0.0, None
        if self.samples is not None:
            self.ways, self.items = int(Way.SAMPLES), self.samples
        self.deferred = self.steps > 1
        self.refresh()

    def resume(self, seen: int, ways: int, items: float) -> None:
        """Continue in the middle of a window, from a checkpoint."""
        self.seen, self.ways, self.items = seen, ways, items
        self.refresh()

    def restart(self) -> None:
        self.seen, self.samples = 0, None
        self.forget()

    def hold(self, holding: bool) -> None:
        """Start or stop deferring the reduction of gradients in all micro-batches (`no_sync`)."""
        self.holding = holding
        self.refresh()

    def force(self, boundary: bool | None) -> None:
        """Set the boundary explicitly; None: count micro-batches again."""
        self.forced = boundary
        self.refresh()

    @contextlib.contextmanager
    def flush(self) -> Iterator[None]:
        """Allow an update with an incomplete window inside the context."""
        self.flushing = True
        try:
            yield
        finally:
            self.flushing = False

    def weigh(self, samples: float | None) -> None:
        """Weight the next micro-batch by its number of samples; None: equal weights."""
        if samples is not None:
            self.count(Way.SAMPLES, samples)
        self.samples = samples
        self.refresh()

    def set_scaler(self, scaler: Any) -> None:
        self.scaler = scaler
        self.refresh()

    def set_rates(self, rates: Callable[[], list[float]]) -> None:
        """Compare the result of `rates`, this rank's hyperparameters, over the ranks before each update."""
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
        """Return the row of numbers that this rank exchanges; see [Note: agreement]."""
        rates_row = tuple(self._rates()) if rates and purpose in (Purpose.STEP, Purpose.FLUSH) else ()
        own = (self.items, self.ways, purpose, detail, self.seen, self.steps, self.micro, self.loss_scale, edits)
        return [*map(float, own), float(hash(rates_row) % (1 << 52)), float(self.leaf_writes), float(known)]

    def rescale(self, agreed: Agreed) -> float:
        if agreed.ways & _BY_COUNT:
            return 1.0 / agreed.items if agreed.items else 1.0  # the count knows a partial window by itself
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
    """Describe differences between the rows of all ranks; None if there are none."""
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
