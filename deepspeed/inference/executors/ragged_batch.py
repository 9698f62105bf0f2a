"""The tensors of one pass: tokens of several sequences, their cache slots, the requested logits.

In a layer's cache one page of zeros precedes page 0: padding reads this page, not data of another sequence, since even
with weight 0 an infinity would spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

PADDED = 1.25  # contexts of one attention call: the longest at most so many times the shortest, plus LEAST
LEAST = 64


@dataclass(frozen=True)
class BatchSlice:
    """Rows of one sequence: `tokens` at positions from `start` on, over the `pages` of the whole sequence.

    Logits of the last `wanted` rows are returned. The scheduler wants none while tokens of its `sequence` stay to be
    computed; then those of the last token and of each draft behind it.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wanted: int = 1
    sequence: Any = None

    @property
    def end(self) -> int:
        """Length of the context, these rows included."""
        return self.start + len(self.tokens)

    @property
    def count(self) -> int:
        """Rows without drafts."""
        return len(self.tokens) - max(self.wanted - 1, 0)

    @property
    def drafts(self) -> Sequence[int]:
        """Guesses of what follows the sequence."""
        return self.tokens[self.count :]


@dataclass
class AttentionGroup:
    """Slices with one number of rows, whose attention is one call."""

    rows: torch.Tensor  # index of their rows in the pass, [sequences, rows]
    positions: torch.Tensor  # of these rows, [sequences, rows]
    ends: torch.Tensor  # lengths of the contexts, [sequences]
    slots: torch.Tensor  # of the contexts in a layer's cache, padded with slot 0, the zeros: [sequences, longest]
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
    """Slices, no two of one sequence, as tensors, each made at its first use. With `even`, only contexts of one length
    are put into one group."""

    def __init__(self, spans: Sequence[BatchSlice], page_size: int, device: torch.device, even: bool = False) -> None:
        self.spans, self.page_size, self.device, self.even = spans, page_size, device, even

    @cached_property
    def tokens(self) -> torch.Tensor:
        return torch.tensor([token for span in self.spans for token in span.tokens], device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        places = [place for span in self.spans for place in range(span.start, span.end)]
        return torch.tensor(places, device=self.device)

    @cached_property
    def firsts(self) -> torch.Tensor:
        """First row of each slice."""
        counts = torch.tensor([len(span.tokens) for span in self.spans])
        return counts.cumsum(0) - counts

    @cached_property
    def tables(self) -> list[torch.Tensor]:
        """Block tables."""
        return [torch.tensor(span.pages, dtype=torch.long) for span in self.spans]

    @cached_property
    def wanted(self) -> torch.Tensor:
        """Rows whose logits are returned."""
        rows, end = [], 0
        for span in self.spans:
            end += len(span.tokens)
            rows.extend(range(end - span.wanted, end))
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    @cached_property
    def new_slots(self) -> torch.Tensor:
        """Where the rows' keys and values go in a layer's cache, [rows]."""
        return torch.cat([self._slots(i)[span.start :] for i, span in enumerate(self.spans)]).to(self.device)

    @cached_property
    def chosen(self) -> list[list[int]]:
        """Indices of the slices of each group: rows equal, contexts of like length."""
        groups: list[list[int]] = []
        for i in sorted(range(len(self.spans)), key=lambda i: (len(self.spans[i].tokens), self.spans[i].end)):
            first, span = self.spans[groups[-1][0] if groups else i], self.spans[i]
            most = first.end if self.even else PADDED * first.end + LEAST
            if not groups or len(first.tokens) != len(span.tokens) or span.end > most:
                groups.append([])
            groups[-1].append(i)
        return groups

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """One for each attention call."""
        return [self._group(chosen) for chosen in self.chosen]

    def _slots(self, index: int) -> torch.Tensor:
        """Places of a whole context in a layer's cache."""
        size, end = self.page_size, self.spans[index].end
        slots = (self.tables[index][: -(-end // size), None] + 1) * size + torch.arange(size)
        return slots.reshape(-1)[:end]

    def _group(self, chosen: list[int]) -> AttentionGroup:
        spans = [self.spans[i] for i in chosen]
        ends = torch.tensor([span.end for span in spans])
        slots = torch.zeros(len(spans), int(ends.max()), dtype=torch.long)
        for row, i in zip(slots, chosen, strict=True):
            row[: self.spans[i].end] = self._slots(i)
        rows = self.firsts[chosen][:, None] + torch.arange(len(spans[0].tokens))
        rows, ends, slots = rows.to(self.device), ends.to(self.device), slots.to(self.device)
        return AttentionGroup(rows, self.positions[rows], ends, slots)
