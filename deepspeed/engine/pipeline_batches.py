"""Micro-batches of one update (a window) in a pipeline, and the callbacks that run them in the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed.engine.train_loop import Window
from deepspeed.errors import ArgumentError, DataError, PipelineError, UsageError
from deepspeed.foundation.pytree import map_tensors
from deepspeed.pipe.executor import Means, ModelPart
from deepspeed.zero.gradients.accumulation import AccumulationWindow, Way
from deepspeed.zero.gradients.sparse_rows import by_rows

FAILED = -1  # instead of a number of micro-batches
EVALUATES, TRAINS, REFUSED = 0.0, 1.0, 2.0  # call of a rank: eval_batch, train_batch, or one that it cannot run


class WindowReport(NamedTuple):
    """Report of a rank to the others about its micro-batches for the next update (its window), as numbers."""

    available: float  # micro-batches that it read, or `FAILED`
    wanted: float  # micro-batches of the window
    samples: float  # whether the window comes from `loop`, which counts samples
    items: float  # whether the caller passed a function that counts items
    follows: float  # whether no part of its stage reads a batch, so that it adopts the window of the others
    does: float  # `EVALUATES`, `TRAINS` or `REFUSED`

    def words(self) -> str:
        """Describe the requested window for an error message."""
        kind = "a window of engine.loop" if self.samples else "an iterator"
        return f"{kind} for {int(self.wanted)} micro-batches{' with num_items' if self.items else ''}"


@dataclass
class AgreedWindow:
    """Micro-batches of an update (a window) on which all ranks have agreed."""

    batches: list[Any]  # this rank's micro-batches; list of None if its stage reads none
    samples: list[float] | None  # samples of each, empty if this rank has no data; None without `loop`
    items: bool  # whether the caller passed a function that counts items


def agree(
    source: Any,
    wanted: int,
    items: bool,
    read: Callable[[], list[Any]] | None,
    exchange: Callable[[WindowReport], list[WindowReport]],
    trains: bool = True,
    refused: Exception | None = None,
) -> AgreedWindow:
    """Read the micro-batches of an update (a window); if one rank cannot, all raise. All ranks must call this.

    Args:
        source: the caller's iterator or `Window`.
        wanted: this rank's number of micro-batches of the window.
        items: whether the caller passed a function that counts items.
        read: returns at most `wanted` micro-batches; None if no part of this stage reads batches.
        exchange: collective that returns the report of every rank, in rank order.
        trains: True for train_batch, False for eval_batch.
        refused: reason why this rank cannot run; raised here after every rank knows.

    Raises:
        DataError: the data of another rank failed, or data ended early.
        UsageError: ranks request different windows or calls.
        PipelineError: another rank refused to run.
    """
    problem = refused
    batches: list[Any] = []
    samples = source.samples if isinstance(source, Window) else None
    try:
        if (
            read is not None and refused is None and (samples is None or not items)
        ):  # otherwise `_check` raises, and the source must not be consumed
            batches = read()
    except Exception as error:  # raised once every rank knows
        problem = error
    available = FAILED if problem is not None else len(batches)
    does = REFUSED if refused is not None else TRAINS if trains else EVALUATES
    rows = exchange(WindowReport(available, wanted, samples is not None, items, read is None, does))
    if problem is not None:
        raise problem
    leading = _check(rows)
    first = next(iter(leading.values()))
    count = int(first.wanted)
    if read is None:
        return AgreedWindow([None] * count, [] if first.samples else None, bool(first.items))
    least = int(min(row.available for row in leading.values()))
    if least < count:
        here = f"this rank had {len(batches)}"
        raise DataError(f"a window takes {count} micro-batches, and the data of a rank ended after {least}; {here}")
    return AgreedWindow(batches, samples, bool(first.items))


def _check(rows: list[WindowReport]) -> dict[int, WindowReport]:
    """Raise if a window cannot start; returns the reports of ranks that read data (if none does, all), by rank."""
    refused = [rank for rank, row in enumerate(rows) if row.does == REFUSED]
    if refused:
        raise PipelineError(f"the call was refused on rank {refused[0]}; see its traceback. No micro-batch was run")
    other = next((rank for rank, row in enumerate(rows) if row.does != rows[0].does), None)
    if other is not None:
        calls = ("train_batch", "eval_batch") if rows[0].does == TRAINS else ("eval_batch", "train_batch")
        raise UsageError(
            f"rank 0 called {calls[0]}() and rank {other} {calls[1]}(); all ranks make the same calls. No micro-batch "
            f"was run"
        )
    leading = {rank: row for rank, row in enumerate(rows) if not row.follows} or dict(enumerate(rows))
    failed = [rank for rank, row in leading.items() if row.available == FAILED]
    if failed:
        raise DataError(f"the data of rank {failed[0]} failed; see its traceback. No micro-batch was run")
    rank, first = next(iter(leading.items()))
    for other, row in leading.items():
        if row[1:4] != first[1:4]:
            raise UsageError(
                f"ranks {rank} and {other} ask for different windows: {first.words()} there, {row.words()} here; "
                f"hand over the same kind on all ranks that have data"
            )
    if first.samples and first.items:
        raise UsageError("engine.loop already counts samples; do not pass num_items with a window of it")
    return leading


def take(source: Any, count: int, through: Callable[[Any], Any] | None, device: torch.device) -> list[Any]:
    """Take at most `count` micro-batches from an iterator, apply `through` (None: nothing), and copy them to `device`.

    Raises:
        ArgumentError: `source` is not an iterator.
    """
    if not hasattr(source, "__next__"):
        raise ArgumentError(
            f"train_batch and eval_batch take an iterator over micro-batches, such as iter(loader), and got a "
            f"{type(source).__name__}"
        )
    prepared: Iterator[Any] = (through(batch) if through else batch for batch in source)
    batches = [batch for _, batch in zip(range(count), prepared, strict=False)]
    return [map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches]


class WindowDriver:
    """Callbacks of the schedule's executor that run this rank's chunks of the model on a window's micro-batches.

    Args:
        parts: this rank's chunks of the model.
        window: accumulates the gradients and scales the losses.
        divided: the model itself divides its loss by the number of micro-batches.
        lookups: embeddings of this stage whose gradients can be sparse (by rows).
    """

    def __init__(
        self,
        parts: list[ModelPart],
        window: AccumulationWindow,
        divided: bool,
        lookups: Sequence[torch.nn.Embedding] = (),
    ) -> None:
        self._parts, self._window, self._divided, self._lookups = parts, window, divided, lookups
        self.ran = {"forward": 0, "backward": 0}  # chunks times micro-batches of the window so far
        self.batches: list[Any] = []
        self._counted: set[int] = set()  # micro-batches whose items are in the window's count
        self.items: list[float] | None = None  # items of each micro-batch, if losses are sums over items
        self.samples: list[float] | None = None  # samples of each micro-batch, the weight of its loss; None: equal
        self.means = Means()
        self.training = True

    def begin(self, batches: list[Any], training: bool) -> None:
        """Start a window with these micro-batches; `training`: run the loss function in the last part."""
        self.batches, self.training, self.means = batches, training, Means()
        self.ran = dict.fromkeys(self.ran, 0)
        self._counted.clear()

    @property
    def costs(self) -> list[float]:
        """Return the costs of all parts of the model, in the simulation's unit; empty if unknown."""
        return self._parts[0].costs

    def words(self, chunk: int) -> str:
        """Return a description of a chunk's layers for messages."""
        return self._parts[chunk].words

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        """Run forward of a chunk on a micro-batch; returns the outputs, or in training the last part's weighted loss.

        `received` is the message of the previous part; chunk and micro-batch are given by their numbers.
        """
        part, batch = self._parts[chunk], self.batches[micro]
        self.ran["forward"] += 1
        with by_rows(self._lookups if self.training else (), batch):
            outputs = part.run(received, batch)
        if not (part.last and self.training):
            return outputs
        loss, weight = part.loss(outputs, batch), 1.0 if self.samples is None else self.samples[micro]
        self.means.add(part.metrics, weight)
        return loss if self.samples is None else loss * weight

    def backward(
        self, micro: int, roots: list[Any], gradients: list[torch.Tensor | None] | None, run: Callable[..., None]
    ) -> None:
        """Run backward of a chunk on a micro-batch; the window's last micro-batch reduces the chunk's gradients.

        Args:
            roots: outputs of the chunk; for the last part, the loss.
            gradients: received gradients of the roots; None for the last part.
            run: runs autograd; called with the scaled loss, or with roots and their gradients.
        """
        window = self._window
        self.ran["backward"] += 1
        items = None if self.items is None else 0.0 if micro in self._counted else self.items[micro]
        self._counted.add(micro)  # count items only once, in the first chunk
        window.count(self._way, items)
        with self._pass(micro):
            if gradients is None:
                loss, scale = roots[0], window.loss_scale
                if loss.requires_grad:
                    run([loss.float() * scale if scale != 1.0 else loss])
                return
            pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
            if pairs:
                run([root for root, _ in pairs], [gradient for _, gradient in pairs])

    def weights(self, micro: int, run: Callable[[], None]) -> None:
        """Call `run`, which computes the postponed weight gradients of a micro-batch."""
        with self._pass(micro):
            run()

    @property
    def _way(self) -> Way:
        return Way.MEAN if self.items is None else Way.ITEMS

    @contextmanager
    def _pass(self, micro: int) -> Iterator[None]:
        """Enter the context of computations that produce gradients of a micro-batch."""
        self._window.force(micro == len(self.batches) - 1)
        with self._window.backward_pass(self._way, by_window=self._way is Way.MEAN and not self._divided):
            yield
