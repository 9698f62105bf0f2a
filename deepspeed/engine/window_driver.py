"""What the executor of a pipeline's schedule asks of the engine that trains: chunks run on batches, and count."""

from __future__ import annotations

from collections.abc import Sequence
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

    def backward(self, micro: int, roots: list[Any], gradients: list[torch.Tensor | None] | None) -> None:
        """Run backward; gradients travel in the window's last micro-batch, as a chunk sees it."""
        window = self._window
        self.ran["backward"] += 1
        window.force(micro == len(self.batches) - 1)
        way = Way.MEAN if self.items is None else Way.ITEMS
        items = None if self.items is None else 0.0 if micro in self._counted else self.items[micro]
        self._counted.add(micro)  # by its first chunk alone
        window.count(way, items)
        with window.backward_pass(way, by_window=way is Way.MEAN and not self._divided):
            if gradients is None:
                loss, scale = roots[0], window.loss_scale
                if loss.requires_grad:
                    (loss.float() * scale if scale != 1.0 else loss).backward()
                return
            pairs = [(root, given) for root, given in zip(roots, gradients, strict=True) if given is not None]
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [given for _, given in pairs])
