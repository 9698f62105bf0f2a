"""Record of what a loader has fed: tokens and padding by batch, lengths, shares of sources; also as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from deepspeed.data.index_lists import Array
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.data.mixture import Mixture
from deepspeed.errors import DataError, NotAvailableError


@dataclass
class FeedRecord:
    """Counts of the batches that one rank was fed.

    Example:
        record = FeedRecord()
        for batch in record.of(loader):
            ...
        record.save_picture("fed.png")

    Args:
        pad_token_id: token of the padding, in batches without an `attention_mask`; it counts at the end of rows only.

    Attributes:
        tokens: number of tokens of each batch, without padding.
        padding: number of padded positions of each batch.
        lengths: length of every sequence; packed ones begin where `position_ids` are 0.
        sources: for each batch of a loader whose dataset is a `Mixture`, how many samples of each source all ranks were
            fed, in the order of `names`; sources whose names came later are left out.
        source_batches: for each element of `sources`, the index of its batch in `tokens`.
        names: names of the sources of all mixtures.
    """

    pad_token_id: int = 0
    tokens: list[int] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sources: list[Array] = field(default_factory=list)
    source_batches: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def of(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and count them."""
        mixture = loader.dataset if isinstance(loader, DeepSpeedDataLoader) else None
        for batch in loader:
            self.add(batch)
            if isinstance(mixture, Mixture) and isinstance(loader, DeepSpeedDataLoader):
                self._add_sources(mixture, loader.last_indices())
            yield batch

    def _add_sources(self, mixture: Mixture, indices: Iterable[int]) -> None:
        self.names += [name for name in mixture.names if name not in self.names]
        columns = [self.names.index(name) for name in mixture.names]
        counts = np.zeros(len(self.names), np.int64)
        for index in indices:
            counts[columns[mixture.source_of(index)]] += 1
        self.sources.append(counts)
        self.source_batches.append(len(self.tokens) - 1)

    def add(self, batch: Any) -> None:
        """Count a batch: a tensor of token ids `[rows, tokens]`, or a mapping with `input_ids`, such as a dict.

        Raises:
            DataError: the batch has no such tensor.
        """
        more: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {}
        ids = more.get("input_ids") if isinstance(batch, Mapping) else batch
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            kind = type(batch).__name__ + (f" of {sorted(map(str, more))}" if isinstance(batch, Mapping) else "")
            raise DataError(f"a batch is counted by its input_ids, a tensor [rows, tokens]; it is a {kind}")
        mask, positions = more.get("attention_mask"), more.get("position_ids")
        real = self._real(ids) if mask is None else mask.bool()
        starts = torch.zeros_like(ids, dtype=torch.bool) if positions is None else positions.expand_as(ids) == 0
        self.tokens.append(int(real.sum()))
        self.padding.append(real.numel() - self.tokens[-1])
        for row, first in zip(real, starts, strict=True):
            begins = (first & row)[row].nonzero()[:, 0].tolist()
            bounds = sorted({0, *begins, int(row.sum())})
            self.lengths += [after - before for before, after in zip(bounds, bounds[1:], strict=False)]

    def _real(self, ids: torch.Tensor) -> torch.Tensor:
        """Return True for tokens that are not in the padding at the end of their row."""
        return (ids != self.pad_token_id).flip(1).cumsum(1).flip(1) > 0

    @property
    def padding_share(self) -> float:
        """Return the share of padded positions; 0 without batches."""
        return sum(self.padding) / max(1, sum(self.padding) + sum(self.tokens))

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw tokens and padding by batch, lengths, and shares of sources; the suffix of the path names the format.

        Raises:
            NotAvailableError: matplotlib is not installed.
            DataError: no batch was counted.
        """
        if find_spec("matplotlib") is None:
            raise NotAvailableError("a picture of what was fed needs matplotlib: pip install 'deepspeed[plot]'")
        if not self.tokens:
            raise DataError("no batch was counted: iterate over record.of(loader) first")
        panels = 4 if self.sources else 3
        figure = import_module("matplotlib.figure").Figure(figsize=(10, 2.4 * ((panels + 1) // 2)))
        axes = figure.subplots((panels + 1) // 2, 2).flatten()
        steps = np.arange(len(self.tokens))
        axes[0].stackplot(steps, self.tokens, self.padding, labels=["tokens", "padding"], step="mid")
        axes[0].set(title="tokens of a batch", xlabel="batch")
        axes[0].legend(loc="lower right")
        shares = np.cumsum(self.padding) / np.maximum(1, np.cumsum(self.padding) + np.cumsum(self.tokens))
        axes[1].plot(steps, 100 * shares)
        axes[1].set(title="share of padding so far, %", xlabel="batch", ylim=(0, None))
        axes[2].hist(self.lengths, bins=min(50, max(self.lengths, default=1)))
        axes[2].set(title="lengths of sequences", xlabel="tokens")
        if self.sources:
            counts = np.cumsum([np.pad(row, (0, len(self.names) - len(row))) for row in self.sources], axis=0)
            parts = (counts / np.maximum(1, counts.sum(axis=1, keepdims=True))).T * 100
            axes[3].stackplot(self.source_batches, *parts, labels=self.names)
            axes[3].set(title="samples by source so far, %", xlabel="batch", xlim=axes[0].get_xlim(), ylim=(0, 100))
            axes[3].legend(loc="lower right")
        else:
            axes[3].set_axis_off()
        figure.tight_layout()
        figure.savefig(os.fspath(path), dpi=120)
