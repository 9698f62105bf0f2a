"""Ragged batch of one pass: tokens of several sequences, their cache slots, and rows with requested logits.

Each layer's cache has a page of zeros before page 0, which padded slots refer to: an infinity in a page of another
sequence would give NaN, even with attention weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.triton.attention import PagedRows

PADDED = 1.25  # maximum ratio of context lengths in one attention call, beyond LEAST more tokens
LEAST = 64


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new host tensor on `device`; the host does not wait for the copy to a GPU."""
    if device.type == "cpu":
        return tensor
    return get_accelerator().pin_memory(tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class BatchSlice:
    """Rows of one sequence in a pass; each token is a row.

    Args:
        tokens: new tokens, then draft tokens.
        start: position of the first token in the sequence.
        pages: pages of the whole sequence.
        wanted: number of last rows with requested logits: 1 for the last token, and 1 for each draft token after it; 0
            in prefill, if tokens of the prompt remain; and the rows of the prompt that are scored.
        sequence: the sequence, for the scheduler.
        adapter: `LoraAdapter` of these rows; None: the model alone.
        scored: number of rows among `wanted`, its first ones, whose logits only score tokens of the prompt.
        hidden: whether the last hidden states of these rows are requested, in `RaggedBatch.hidden`.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wanted: int = 1
    sequence: Any = None
    adapter: Any = None
    scored: int = 0
    hidden: bool = False

    @property
    def end(self) -> int:
        """Length of the context, including these rows."""
        return self.start + len(self.tokens)

    @property
    def count(self) -> int:
        """Number of rows without draft tokens."""
        return len(self.tokens) - max(self.wanted - self.scored - 1, 0)

    @property
    def drafts(self) -> Sequence[int]:
        """Draft tokens (speculative decoding): all but the first `count` tokens."""
        return self.tokens[self.count :]


@dataclass
class AttentionGroup:
    """Slices with equal numbers of rows, for one attention call.

    Args:
        rows: indices of the rows in the pass, int64 [sequences, rows].
        positions: positions of these rows in their sequences, [sequences, rows].
        ends: lengths of the contexts, [sequences].
        slots: cache slots of the contexts, padded with slot 0 (zeros), [sequences, longest].
        masks: attention masks that were computed already.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    masks: dict[int, tuple[object, torch.Tensor | None]] = field(default_factory=dict)

    def mask(self, function: Callable[..., torch.Tensor], keep: object) -> torch.Tensor | None:
        """Return the attention mask, bool [sequences, 1, rows, longest]; None if all keys are visible.

        Args:
            function: mask function of Transformers, with arguments (batch, head, query position, key position).
            keep: key of the cached mask; layers of this pass with the same object share a mask.
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


class ChosenTokens:
    """Tokens that a pass has chosen on the device, and their copy to the host, which begins at once.

    Args:
        tokens: int32 [rows] on the device; the executor's next pass may overwrite them.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self.on_device = tokens
        self._event: Any = None
        if tokens.device.type == "cpu":
            self._host = tokens.clone()
            return
        accelerator = get_accelerator()
        self._host = accelerator.pin_memory(torch.empty(tokens.shape, dtype=tokens.dtype))
        self._host.copy_(tokens, non_blocking=True)
        self._event = accelerator.Event()
        self._event.record()

    def read(self) -> list[int]:
        """Wait for the tokens; -1 where logits are not finite."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()

    def feed(self, rows: Sequence[int], target: torch.Tensor) -> None:
        """Launch the copy of the tokens of `rows` to `target`, int64 [rows]; tokens that are -1 become 0."""
        tokens = self.on_device[: len(rows)]
        if list(rows) != list(range(len(rows))):
            tokens = self.on_device.index_select(0, sent(torch.tensor(rows), target.device))
        target.copy_(tokens.clamp(min=0))


@dataclass
class RowSampling:
    """How the next tokens of the rows with logits are chosen on the device.

    Args:
        options: fp32 [rows with logits, 8], from `ops.triton.sampling.options_of`; all 0: greedy.
        seeds: int64 [rows with logits], seeds of the requests.
        counts: int32 [rows with logits], draws of a request before this one.
        seen: for penalties: (row, token, entry) of each token in prompt or output, int64 [3, entries], with the entries
            of the table in `ops.triton.sampling.sample`; None: no row has penalties.
        on_device: for each slice of the batch, whether its tokens are chosen on the device.
        chosen: the chosen tokens of the rows, set by the executor; None: the executor has chosen none.
    """

    options: torch.Tensor
    seeds: torch.Tensor
    counts: torch.Tensor
    seen: torch.Tensor | None = None
    on_device: Sequence[bool] = ()
    chosen: ChosenTokens | None = None


class RaggedBatch:
    """Batch of slices of different sequences; each tensor is created on first use.

    Args:
        spans: the slices.
        page_size: tokens per page.
        device: device of the tensors.
        even: whether a group has only contexts of equal length.
    """

    def __init__(self, spans: Sequence[BatchSlice], page_size: int, device: torch.device, even: bool = False) -> None:
        self.spans, self.page_size, self.device, self.even = spans, page_size, device, even
        self.hidden: torch.Tensor | None = None  # last hidden states of all rows, [rows, width], if a slice wants them
        self.sampling: RowSampling | None = None  # how tokens are chosen on the device; None: by the caller
        # Tokens of the slices that the host has not read: those of an earlier pass, and the row of each slice in it.
        self.after: tuple[ChosenTokens, Sequence[int]] | None = None

    def know_tokens(self) -> None:
        """Wait for the tokens that the host has not read, and write them into the slices."""
        if self.after is None:
            return
        (chosen, rows), self.after = self.after, None
        tokens = chosen.read()
        for span, row in zip(self.spans, rows, strict=True):
            span.tokens[0] = max(tokens[row], 0)  # type: ignore[index]

    @property
    def wants_hidden(self) -> bool:
        """Whether a slice wants its last hidden states."""
        return any(span.hidden for span in self.spans)

    @contextmanager
    def recording(self, model: Any, rows: torch.Tensor | None = None) -> Iterator[None]:
        """Context of one call of `model` that records the last hidden states of its rows, if a slice wants them.

        Args:
            model: causal LM with a `base_model`.
            rows: indices of the rows in the call, [sequences, rows]; None: all rows, as one sequence.
        """
        if not self.wants_hidden:
            yield
            return

        def record(module: Any, args: Any, output: Any) -> None:
            states = output[0].detach()
            if rows is None:
                self.hidden = states[0]
                return
            hidden = states.new_zeros(len(self.tokens), states.shape[-1]) if self.hidden is None else self.hidden
            hidden[rows] = states
            self.hidden = hidden

        handle = model.base_model.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()

    @cached_property
    def tokens(self) -> torch.Tensor:
        return sent(torch.tensor([token for span in self.spans for token in span.tokens]), self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        places = [place for span in self.spans for place in range(span.start, span.end)]
        return sent(torch.tensor(places), self.device)

    @cached_property
    def firsts(self) -> torch.Tensor:
        """Index of the first row of each slice, int64 [slices]."""
        counts = torch.tensor([len(span.tokens) for span in self.spans])
        return counts.cumsum(0) - counts

    @cached_property
    def tables(self) -> list[torch.Tensor]:
        """Block table (page numbers) of each slice, int64."""
        return [torch.tensor(span.pages, dtype=torch.long) for span in self.spans]

    @cached_property
    def paged_rows(self) -> PagedRows:
        """Rows and pages of the slices, for attention that reads pages in place."""
        table = torch.nn.utils.rnn.pad_sequence(self.tables, batch_first=True, padding_value=-1)
        counts, lengths = [len(span.tokens) for span in self.spans], [span.end for span in self.spans]
        return PagedRows(counts, lengths, sent(table.to(torch.int32), self.device), sent)

    @cached_property
    def block_table(self) -> torch.Tensor:
        """Places of the slices' pages in a layer's tensors, int32 [slices, pages]: the page of zeros comes first."""
        return self.paged_rows.table + 1

    @cached_property
    def row_starts(self) -> torch.Tensor:
        """Index of the first row of each slice, then the number of rows, int32 [slices + 1] on the device."""
        rows = [len(span.tokens) for span in self.spans]
        return sent(torch.tensor([0, *rows]).cumsum(0).to(torch.int32), self.device)

    @cached_property
    def context_lengths(self) -> torch.Tensor:
        """Length of each slice's context with its rows, int32 [slices] on the device."""
        return sent(torch.tensor([span.end for span in self.spans], dtype=torch.int32), self.device)

    @cached_property
    def wanted(self) -> torch.Tensor:
        """Indices of the rows with requested logits, int64."""
        rows, end = [], 0
        for span in self.spans:
            end += len(span.tokens)
            rows.extend(range(end - span.wanted, end))
        return sent(torch.tensor(rows, dtype=torch.long), self.device)

    @cached_property
    def new_slots(self) -> torch.Tensor:
        """Cache slots for the keys and values of the new rows, [rows]."""
        return sent(torch.cat([self._slots(i)[span.start :] for i, span in enumerate(self.spans)]), self.device)

    @cached_property
    def chosen(self) -> list[list[int]]:
        """Indices of the slices in each group; a group has equal numbers of rows and contexts of similar length."""
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
        """Groups of slices, one for each attention call, in the order of `chosen`."""
        return [self._group(chosen) for chosen in self.chosen]

    def _slots(self, index: int) -> torch.Tensor:
        """Return the cache slots of the whole context of slice `index`, int64 [length]."""
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
        rows, ends, slots = (sent(each, self.device) for each in (rows, ends, slots))
        return AttentionGroup(rows, self.positions[rows], ends, slots)
