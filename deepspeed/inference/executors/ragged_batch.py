"""The tensors of one pass: tokens of several sequences, their cache slots, the wanted logits.

Page p lies in a layer's cache behind one page of zeros: padding reads that, never what some sequence wrote, since even
at weight 0 a neighbour's infinity would spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

PADDED = 1.25  # contexts of one attention call: the longest at most so many times the shortest, plus LEAST
LEAST = 64


@dataclass(frozen=True)
class BatchSlice:
    """Rows of one sequence: `tokens` at positions from `start` on, over the `pages` of the whole sequence. Logits of
    the last `wanted` rows are returned."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wanted: int = 1

    @property
    def end(self) -> int:
        """Length of the context, these rows included."""
        return self.start + len(self.tokens)


@dataclass
class AttentionGroup:
    """Spans with one number of rows, whose attention is one call.

    Args:
        rows: index of their rows in the pass, [sequences, rows].
        positions: of these rows, [sequences, rows].
        ends: lengths of the contexts, [sequences].
        slots: where the contexts lie in a layer's cache, padded with slot 0, the zeros, [sequences, longest].
    """

    rows: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    whole: bool  # no context is padded
    masks: dict[int, tuple[object, torch.Tensor | None]] = field(default_factory=dict)

    def mask(self, function: Callable[..., torch.Tensor], keep: object) -> torch.Tensor | None:
        """Which keys each row sees, [sequences, 1, rows, longest]; None where it is all of them.

        Args:
            function: of (batch, head, query position, key position), as Transformers' masks are written.
            keep: what `function` belongs to; the mask is kept under it for the other layers of the pass.
        """
        if id(keep) not in self.masks:
            self.masks[id(keep)] = (keep, self._mask(function))
        return self.masks[id(keep)][1]

    def _mask(self, function: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        zero = torch.zeros((), dtype=torch.long, device=self.rows.device)
        keys = torch.arange(self.slots.shape[1], device=self.rows.device)[None, None, None, :]
        allowed = function(zero, zero, self.positions[:, None, :, None], keys)
        allowed = allowed & (keys < self.ends[:, None, None, None])
        return None if bool(allowed.all()) else allowed


class RaggedBatch:
    """Spans as tensors, each made when it is first asked for.

    Args:
        spans: of the pass; no two of one sequence.
        page_size: tokens of a page.
        device: of the model.
        even: only contexts of one length are put into one group.
    """

    def __init__(self, spans: Sequence[BatchSlice], page_size: int, device: torch.device, even: bool = False) -> None:
        self.spans, self.page_size, self.device, self.even = spans, page_size, device, even

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Of all rows."""
        return torch.tensor([token for span in self.spans for token in span.tokens], device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Of all rows."""
        return torch.tensor([at for span in self.spans for at in range(span.start, span.end)], device=self.device)

    @cached_property
    def firsts(self) -> torch.Tensor:
        """First row of each span."""
        counts = torch.tensor([len(span.tokens) for span in self.spans])
        return counts.cumsum(0) - counts

    @cached_property
    def tables(self) -> list[torch.Tensor]:
        """Pages of each span."""
        return [torch.tensor(span.pages, dtype=torch.long) for span in self.spans]

    @cached_property
    def wanted(self) -> torch.Tensor:
        """Rows whose logits are returned."""
        found, first = [], 0
        for span in self.spans:
            first += len(span.tokens)
            found.extend(range(first - span.wanted, first))
        return torch.tensor(found, dtype=torch.long, device=self.device)

    @cached_property
    def new_slots(self) -> torch.Tensor:
        """Where the rows' keys and values go in a layer's cache, [rows]."""
        return torch.cat([self._slots(i)[span.start :] for i, span in enumerate(self.spans)]).to(self.device)

    @cached_property
    def chosen(self) -> list[list[int]]:
        """Indices of each group's spans."""
        return list(self._alike())

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """Spans whose attention is one call."""
        return [self._group(chosen) for chosen in self.chosen]

    def _slots(self, index: int) -> torch.Tensor:
        """Places of a whole context in a layer's cache."""
        size, end = self.page_size, self.spans[index].end
        slots = (self.tables[index][: -(-end // size), None] + 1) * size + torch.arange(size)
        return slots.reshape(-1)[:end]

    def _alike(self) -> Iterator[list[int]]:
        """Indices of spans whose attention goes together: rows equal, contexts of like length."""
        order = sorted(range(len(self.spans)), key=lambda i: (len(self.spans[i].tokens), self.spans[i].end))
        chosen: list[int] = []
        for i in order:
            if chosen:
                first, span = self.spans[chosen[0]], self.spans[i]
                most = first.end if self.even else PADDED * first.end + LEAST
                if len(first.tokens) != len(span.tokens) or span.end > most:
                    yield chosen
                    chosen = []
            chosen.append(i)
        if chosen:
            yield chosen

    def _group(self, chosen: list[int]) -> AttentionGroup:
        spans = [self.spans[i] for i in chosen]
        ends = torch.tensor([span.end for span in spans])
        slots = torch.zeros(len(spans), int(ends.max()), dtype=torch.long)
        for row, i in zip(slots, chosen, strict=True):
            row[: self.spans[i].end] = self._slots(i)
        rows = self.firsts[chosen][:, None] + torch.arange(len(spans[0].tokens))
        rows, ends, slots = rows.to(self.device), ends.to(self.device), slots.to(self.device)
        return AttentionGroup(rows, self.positions[rows], ends, slots, bool((ends == ends[0]).all()))
