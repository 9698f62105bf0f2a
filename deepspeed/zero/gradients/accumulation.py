"""Gradient accumulation: the micro-batches between two updates, and the checks over ranks before one.

Whoever drives training (an engine, a pipeline's schedule) holds one window and tells it where a micro-batch ends and
which backward pass runs. The gradient side (`zero/gradients/reducer`) asks it what a gradient is multiplied by and
whether it travels now; the optimizer asks what the sum is divided by.

[Note: agreement] Counts, boundary, ways of counting, loss scale and hyperparameters are set by every rank alone. They
travel in the row that `Reducer.finish` exchanges anyway. When they differ, every rank raises the same `UsageError`, the
window is dropped on all of them, and no parameter has changed: a difference is never silent, and costs no message.
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
    """Ways of counting what a window's gradient is the mean over."""

    NONE = 0
    MEAN = 1  # over micro-batches and ranks: the plain backward
    SUM = 2  # over ranks only (`scale_wrt_gas=False`)
    ITEMS = 4  # of sums over items (`num_items`)
    SAMPLES = 8  # over real samples (`engine.loop`)


_BY_COUNT = int(Way.ITEMS | Way.SAMPLES)  # `step` divides by the global count
_WORDS = {
    Way.MEAN: "plain backward",
    Way.SUM: "backward(scale_wrt_gas=False)",
    Way.ITEMS: "backward(num_items=…)",
    Way.SAMPLES: "engine.loop",
}


class Purpose(enum.IntEnum):
    """Why ranks meet."""

    STEP = 0
    FLUSH = 1
    ZERO_GRAD = 2
    READ = 3
    WRITE = 4
    REDUCE = 5


_CALLS = ("step()", "flush()", "zero_grad()", "a read of a gradient", "a change of a gradient", "allreduce_gradients()")


@dataclass(frozen=True)
class Agreed:
    """What a window's ranks hold together.

    Args:
        items: items or samples of all ranks.
        ways: every way of counting that some rank used.
        known: the norm of its gradients has been formed on every rank, and nothing has changed since.
    """

    items: float
    ways: Way
    known: bool = False


@dataclass(frozen=True)
class _BackwardPass:
    """A backward pass that a driver has announced."""

    way: Way
    by_window: bool
    scaled: bool
    task: int | None = None  # the pass of autograd it is bound to; None: until it is closed


_BARE = _BackwardPass(Way.MEAN, True, False)  # loss.backward() of the user's own


class AccumulationWindow:
    """Where a driver stands between two updates.

    Args:
        steps: micro-batches per update (`gradient_accumulation_steps`).
        micro: samples per rank and micro-batch.
        ranks: what the sum over ranks is divided by: their number (when gradients are summed, that of the ranks which
            share a sequence), for they all differentiate the loss.
        scaler: loss scaler; None when losses are not scaled.
        refuses_bare: why every backward pass has to be announced; empty: it need not.
    """

    def __init__(self, steps: int, micro: int, ranks: int, scaler: Any = None, refuses_bare: str = "") -> None:
        self.steps, self.micro, self.ranks, self.scaler = steps, micro, ranks, scaler
        self.seen = 0  # micro-batches that have ended
        self.refuses_bare = refuses_bare
        self.forced: bool | None = None  # the boundary, where a driver decides it
        self.holding = False  # gradients are not to be reduced (`no_sync`)
        self.flushing = False  # the update that comes is that of a window that is not full
        self.samples: float | None = None  # real samples of the micro-batch, when a loop counts them
        self.rates: Callable[[], list[float]] = list  # hyperparameters, told by the optimizer
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
        """Factor on the loss (1 when losses are not scaled)."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    @property
    def boundary(self) -> bool:
        """Whether the running micro-batch is the last one."""
        return (self.seen + 1) % self.steps == 0 if self.forced is None else self.forced

    def refresh(self) -> None:
        """Form what the gradient side reads with each gradient, after a change."""
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
        """The one rule of scaling: what a gradient is multiplied by when it enters the accumulator."""
        scale = self.loss_scale if of.scaled else 1.0
        if self.samples is not None:
            return self.micro / scale
        if of.way is Way.ITEMS:
            return 1.0 / scale  # the division comes in `step`, when their global count is known
        return 1.0 / (self.ranks * (self.steps if of.by_window else 1) * scale)

    @property
    def travel_factor(self) -> float:
        """The factor of the last announced pass, or what one would have: sums are narrowed for the wire by it."""
        return self._factor(_BackwardPass(Way.MEAN, True, True)) if self._travel is None else self._travel

    @contextlib.contextmanager
    def backward_pass(self, way: Way = Way.MEAN, *, by_window: bool = True) -> Iterator[None]:
        """Inside, gradients are those of a loss that carries the loss scale; a bare backward after it is bare again.

        Args:
            way: how the loss counts.
            by_window: divide by the number of micro-batches.
        """
        before, self._pass = self._pass, _BackwardPass(way, by_window, True)
        self.refresh()
        try:
            yield
        finally:
            self._pass = before
            self.refresh()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for a backward of the user's own; the factor holds for that pass alone."""
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
        """A gradient is about to enter the accumulator."""
        task = self._pass.task
        if task is not None and task != torch._C._current_graph_task_id():  # that pass was ended by an exception
            self._close()
        if self.refuses_bare and self._pass is _BARE:
            raise UsageError(self.refuses_bare)
        self.ways |= self.way

    # -- counting -----------------------------------------------------------------------------------------------------

    def count(self, way: Way, items: float | None = None) -> None:
        """A micro-batch is run backward.

        Args:
            way: how its loss counts.
            items: its share of the window's divisor, with `ITEMS` and `SAMPLES`.

        Raises:
            UsageError: the window has counted in a way that does not mix with this one.
            ArgumentError: `items` is no count.
        """
        if items is not None and not (isinstance(items, (int, float)) and 0 <= items < math.inf):
            raise ArgumentError(f"num_items is this rank's count of items, a number of 0 or more; got {items!r}")
        mixed = _mixes(self.ways | int(way))
        if mixed:
            raise UsageError(f"a window mixes {mixed}; use one of them throughout")
        self.ways |= int(way)
        self.items += items or 0.0

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; whether the update follows."""
        boundary = self.boundary
        self.seen += 1
        self._pass, self.samples = _BARE, None
        if not boundary:
            self.refresh()
        return boundary

    def forget(self) -> None:
        """Its gradients are gone (`zero_grad`); micro-batches stay counted, and samples of the running one."""
        self.ways, self.items, self._travel = 0, 0.0, None
        if self.samples is not None:
            self.ways, self.items = int(Way.SAMPLES), self.samples
        self.deferred = self.steps > 1
        self.refresh()

    def resume(self, seen: int, ways: int, items: float) -> None:
        """Go on in the middle, as a checkpoint left it."""
        self.seen, self.ways, self.items = seen, ways, items
        self.refresh()

    def restart(self) -> None:
        """The next micro-batch is the first one."""
        self.seen, self.samples = 0, None
        self.forget()

    def hold(self, holding: bool) -> None:
        """Whether gradients wait, whatever micro-batch runs (`no_sync`)."""
        self.holding = holding
        self.refresh()

    def force(self, boundary: bool | None) -> None:
        """Decide the boundary instead of the count; None: let it decide again."""
        self.forced = boundary
        self.refresh()

    @contextlib.contextmanager
    def flush(self) -> Iterator[None]:
        """The update inside is that of a window that need not be full."""
        self.flushing = True
        try:
            yield
        finally:
            self.flushing = False

    def weigh(self, samples: float | None) -> None:
        """The micro-batch that comes counts for so many samples; None: as any other."""
        if samples is not None:
            self.count(Way.SAMPLES, samples)
        self.samples = samples
        self.refresh()

    def set_scaler(self, scaler: Any) -> None:
        """Losses are scaled from now on, or with None are not."""
        self.scaler = scaler
        self.refresh()

    def set_micro(self, micro: int) -> None:
        """Change the number of samples per rank and micro-batch."""
        self.micro = micro
        self.refresh()

    def set_steps(self, steps: int) -> None:
        """Change the number of micro-batches, between windows."""
        self.steps = steps
        self.deferred = steps > 1
        self.refresh()

    # -- agreement ----------------------------------------------------------------------------------------------------

    @property
    def update(self) -> Purpose:
        """Which kind of update comes."""
        return Purpose.FLUSH if self.flushing else Purpose.STEP

    def row(self, purpose: Purpose, detail: int, edits: int, *, rates: bool = True, known: bool = False) -> list[float]:
        """What this rank says of its window; see [Note: agreement].

        Args:
            purpose: why ranks meet.
            detail: place of the parameter that is read or written, else 0.
            edits: gradients that were changed in place.
            rates: say hyperparameters too; stages of a model may have others.
            known: see `Agreed`; ranks need not be equal in it.
        """
        rates_row = tuple(self.rates()) if rates and purpose in (Purpose.STEP, Purpose.FLUSH) else ()
        own = (self.items, self.ways, purpose, detail, self.seen, self.steps, self.micro, self.loss_scale, edits)
        return [*map(float, own), float(hash(rates_row) % (1 << 52)), float(self.leaf_writes), float(known)]

    def rescale(self, agreed: Agreed) -> float:
        """Factor on the window's gradients in the update."""
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


def agreed(table: Sequence[Sequence[float]]) -> Agreed:
    """What the rows of all ranks come to."""
    ways = 0
    for row in table:
        ways |= int(row[1])
    return Agreed(sum(row[0] for row in table), Way(ways), all(row[_COMPARED] for row in table))


def disagreement(table: Sequence[Sequence[float]]) -> str | None:
    """What differs between the rows of all ranks, in words; None when nothing does."""
    rows = [row[2:_COMPARED] for row in table]
    if any(row != rows[0] for row in rows):
        return "; ".join(_differences(rows))
    ways = agreed(table).ways
    mixed = _mixes(ways)
    if mixed:
        ways_by_rank = ", ".join(f"rank {r}: {_describe_ways(Way(int(row[1])))}" for r, row in enumerate(table))
        return f"the window mixes {mixed} ({ways_by_rank})"
    if rows[0][0] == Purpose.FLUSH and ways & Way.MEAN and ways & Way.SUM:
        return "flush() of a window that mixes plain backward with scale_wrt_gas=False: its mean is not defined"
    return None


def _differences(rows: Sequence[Sequence[float]]) -> Iterator[str]:
    for (what, say), values in zip(_FIELDS, zip(*rows, strict=True), strict=True):
        if len(set(values)) > 1:
            yield ", ".join(f"rank {rank} {what} {say(value)}" for rank, value in enumerate(values))


def _mixes(ways: int) -> str:
    """The ways of a window that cannot be one mean; empty when they can."""
    counting = ways & _BY_COUNT
    alone = counting == ways and counting != _BY_COUNT
    return _describe_ways(Way(ways)) if counting and not alone else ""


def _describe_ways(ways: Way) -> str:
    return " with ".join(words for way, words in _WORDS.items() if ways & way) or "no backward"
