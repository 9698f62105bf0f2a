"""What the executor of a pipeline's schedule asks of the engine that trains: chunks run on batches, and count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.pipe.count import Means
from deepspeed.pipe.executor import Part
from deepspeed.zero.accumulation import AccumulationWindow, Way
from deepspeed.zero.rows import by_rows


class WindowDriver:
    """What the executor asks of a training engine.

    Args:
        parts: of this stage, by chunk.
        window: the micro-batches between two updates.
        divided: the model divides its loss by the micro-batches itself.
        lookups: tables of this stage whose gradients can come by rows.
    """

    def __init__(
        self, parts: list[Part], window: AccumulationWindow, divided: bool, lookups: Sequence[torch.nn.Embedding] = ()
    ) -> None:
        self._parts, self._window, self._divided, self._lookups = parts, window, divided, lookups
        self.ran = {"forward": 0, "backward": 0}  # chunks times micro-batches of the window so far
        self.batches: list[Any] = []
        self._counted: set[int] = set()  # micro-batches whose items are in the window's count
        self.items: list[float] | None = None  # of each micro-batch, where losses are sums over items
        self.samples: list[float] | None = None  # that the mean loss of each counts for, where a loop says so
        self.means = Means()
        self.training = True

    def begin(self, batches: list[Any], training: bool) -> None:
        """A window of micro-batches comes."""
        self.batches, self.training, self.means = batches, training, Means()
        self.ran = dict.fromkeys(self.ran, 0)
        self._counted.clear()

    @property
    def costs(self) -> list[float]:
        """Of all parts of the model, by simulation's unit; empty: not known."""
        return self._parts[0].costs

    def words(self, chunk: int) -> str:
        """Which layers a chunk is."""
        return self._parts[chunk].words

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        """Run a chunk; the last part gives its loss in training."""
        part, batch = self._parts[chunk], self.batches[micro]
        self.ran["forward"] += 1
        with by_rows(self._lookups if self.training else (), batch):
            made = part.run(received, batch)
        if not (part.last and self.training):
            return made
        loss, weight = part.loss(made, batch), 1.0 if self.samples is None else self.samples[micro]
        self.means.add(part.metrics, weight)
        return loss if self.samples is None else loss * weight

    def backward(
        self, micro: int, roots: list[Any], gradients: list[torch.Tensor | None] | None, run: Callable[..., None]
    ) -> None:
        """Run backward; gradients travel in the window's last micro-batch, as a chunk sees it."""
        window = self._window
        self.ran["backward"] += 1
        items = None if self.items is None else 0.0 if micro in self._counted else self.items[micro]
        self._counted.add(micro)  # by its first chunk alone
        window.count(self._way, items)
        with self._pass(micro):
            if gradients is None:
                loss, scale = roots[0], window.loss_scale
                if loss.requires_grad:
                    run([loss.float() * scale if scale != 1.0 else loss])
                return
            pairs = [(root, given) for root, given in zip(roots, gradients, strict=True) if given is not None]
            if pairs:
                run([root for root, _ in pairs], [given for _, given in pairs])

    def weights(self, micro: int, run: Callable[[], None]) -> None:
        """Run what a backward has put off; its gradients enter as those that did not wait."""
        with self._pass(micro):
            run()

    @property
    def _way(self) -> Way:
        return Way.MEAN if self.items is None else Way.ITEMS

    @contextmanager
    def _pass(self, micro: int) -> Iterator[None]:
        """Around what gives gradients of a micro-batch."""
        self._window.force(micro == len(self.batches) - 1)
        with self._window.backward_pass(self._way, by_window=self._way is Way.MEAN and not self._divided):
            yield
