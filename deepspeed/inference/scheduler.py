"""Scheduler of forward passes: continuous batching with chunked prefill; each token is a row of a pass.

Blocks of the KV cache are also called pages (`kv_cache.py`). The scheduler creates no tensors and is independent of
the model.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.inference.executors.ragged_batch import BatchSlice
from deepspeed.inference.kv_cache import BlockPool, PrefixBlock


@dataclass(eq=False)
class TokenSequence:
    """Tokens of one sequence. Keys and values of its first `computed` tokens are in the cache blocks `pages`."""

    ident: Hashable
    tokens: list[int]
    arrival: int  # number in order of arrival: the lowest is the oldest
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    prefix: PrefixBlock | None = None  # node above the next full block in the prefix tree; None: not added
    registered: int = 0  # number of leading blocks added to the prefix tree
    reused: int = 0  # number of tokens reused from other sequences on admission
    adapter: Any = None  # `LoraAdapter` of its rows; None: the model alone
    root: PrefixBlock | None = None  # of the prefix tree for its adapter; None: the pool's own

    @property
    def pending(self) -> int:
        """Number of tokens without keys and values."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether the sequence is decoding: exactly one token has no keys and values. Otherwise it is in prefill."""
        return len(self.tokens) - self.computed == 1


class Scheduler:
    """Scheduler that plans decoding sequences before sequences in prefill, and the oldest of each first.

    Prefill is split into chunks. Blocks are allocated when tokens need them. When the pool has no block left, the
    youngest running sequence is preempted: its blocks return to the pool, and the sequence returns to the queue.

    Args:
        pool: the block pool.
        copy: function (from, to) that copies the content of a block before the next pass.
        max_tokens: maximum number of rows in a pass.
        max_sequences: maximum number of running sequences; values above `max_tokens` are reduced to it.
        chunk: maximum number of prefill rows in a pass with decoding sequences. A pair (low, high): twice the number of
            decoding sequences, clamped to this range. None: no limit but `max_tokens`.
    """

    def __init__(
        self,
        pool: BlockPool,
        copy: Callable[[int, int], None],
        max_tokens: int = 768,
        max_sequences: int = 512,
        chunk: int | tuple[int, int] | None = None,
    ) -> None:
        self.pool, self._copy = pool, copy
        self.max_tokens, self.max_sequences = max_tokens, min(max_sequences, max_tokens)
        chunk = max_tokens if chunk is None else chunk
        self.min_chunk, self.max_chunk = (chunk, chunk) if isinstance(chunk, int) else chunk
        self.running: list[TokenSequence] = []  # in order of arrival
        self.waiting: deque[TokenSequence] = deque()  # in order of arrival
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        """Whether there are neither running nor waiting sequences."""
        return not self.running and not self.waiting

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of this many tokens fits into the cache alone."""
        return self._pages_for(tokens) <= self.pool.count

    def add(self, sequence: TokenSequence) -> None:
        """Append a sequence to the queue; the caller has to check `fits` for its maximum length."""
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a finished or cancelled sequence; its blocks return to the pool at once."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop(sequence)

    def plan(self, drafts: Callable[[TokenSequence, int], Sequence[int]] | None = None) -> list[BatchSlice]:
        """Plan the rows of the next pass and allocate their blocks.

        Args:
            drafts: function (decoding sequence, maximum number) that returns draft tokens; None: no drafts.

        Returns:
            One slice for each sequence in the pass, in order of arrival.
        """
        before = self.preemptions
        slices: dict[TokenSequence, BatchSlice] = {}
        left = self.max_tokens
        order = sorted(self.running, key=lambda sequence: (not sequence.decodes, sequence.arrival))
        decoding = sum(sequence.decodes for sequence in order)
        chunk = min(self.max_chunk, max(self.min_chunk, 2 * decoding)) if decoding else self.max_tokens
        for number, sequence in enumerate(order):
            if not left:
                break
            if self.preemptions > before and sequence not in self.running:  # preempted in this plan
                continue
            if sequence.decodes:
                spare = left - (len(order) - number)  # a row for this sequence and for each later one
                guesses = drafts(sequence, spare) if drafts is not None and spare > 0 else ()
                self._schedule(sequence, 1, guesses, slices)
            else:
                chunk -= self._schedule(sequence, min(sequence.pending, left, chunk), (), slices)
            if self.preemptions > before:  # a preempted sequence frees its rows: count again
                left = self.max_tokens - sum(len(rows.tokens) for rows in slices.values())
            elif sequence in slices:
                left -= len(slices[sequence].tokens)
        if self.preemptions == before:  # otherwise blocks are short, and no sequence is admitted
            self._admit(slices, left, chunk)
        return [slices[sequence] for sequence in sorted(slices, key=lambda sequence: sequence.arrival)]

    def advance(self, rows: BatchSlice, accepted: Sequence[int]) -> None:
        """Update a sequence after a pass: count the computed tokens, append new ones, and register full blocks.

        Args:
            rows: slice of the sequence in this pass.
            accepted: accepted drafts and the token after them; empty while the sequence is in prefill.
        """
        sequence = rows.sequence
        sequence.computed = rows.start + rows.count + max(len(accepted) - 1, 0)
        sequence.tokens += accepted
        size = self.pool.size
        while sequence.prefix is not None and (sequence.registered + 1) * size <= sequence.computed:
            first = sequence.registered * size
            page_tokens, page = sequence.tokens[first : first + size], sequence.pages[sequence.registered]
            sequence.prefix = self.pool.remember(sequence.prefix, page_tokens, page)
            sequence.registered += 1

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.size)

    def _schedule(
        self, sequence: TokenSequence, count: int, drafts: Sequence[int], slices: dict[TokenSequence, BatchSlice]
    ) -> int:
        """Add a slice with `count` tokens of a sequence and its drafts to `slices`; preempt others if blocks are short.

        Returns:
            `count`; 0 if `count` is not positive, or if this sequence itself was the youngest and was preempted.
        """
        if count <= 0:
            return 0
        start = sequence.computed
        if drafts and self._pages_for(start + count + len(drafts)) - len(sequence.pages) > self.pool.available:
            drafts = ()  # no preemption for drafts
        need = self._pages_for(start + count + len(drafts))
        while need - len(sequence.pages) > self.pool.available:
            youngest = self.running[-1]
            self._preempt(youngest)
            slices.pop(youngest, None)  # the victim may be in this pass already
            if youngest is sequence:
                return 0
        while len(sequence.pages) < need:
            sequence.pages.append(self.pool.take())
        tokens = [*sequence.tokens[start : start + count], *drafts]
        # Logits determine the token after a row, so only the last chunk of a prefill needs any; a draft is checked by
        # the token chosen before it.
        logits_wanted = 1 + len(drafts) if start + count == len(sequence.tokens) else 0
        slices[sequence] = BatchSlice(tokens, start, sequence.pages, logits_wanted, sequence, sequence.adapter)
        return count

    def _admit(self, slices: dict[TokenSequence, BatchSlice], left: int, chunk: int) -> None:
        """Admit waiting sequences, the oldest first, while the pass has rows for them and the pool has blocks."""
        while self.waiting and len(self.running) < self.max_sequences and min(left, chunk) > 0:
            sequence = self.waiting[0]
            if not self._room_for(sequence):
                return
            self.waiting.popleft()
            bisect.insort(self.running, sequence, key=lambda other: other.arrival)
            self._reuse(sequence)
            scheduled = self._schedule(sequence, min(sequence.pending, left, chunk), (), slices)
            if not scheduled:  # preempted: the copy of a shared block used the last block; the next plan has room
                return
            left, chunk = left - scheduled, chunk - scheduled

    def _room_for(self, sequence: TokenSequence) -> bool:
        """Whether the pool has blocks for all tokens of a sequence, plus one for each running sequence.

        This avoids immediate preemption. Blocks shared with running sequences need no room. True if none is running.
        """
        held = {
            node.page
            for node in self.pool.match(sequence.tokens, sequence.root).nodes
            if self.pool.references(node.page)
        }
        need = self._pages_for(len(sequence.tokens)) - len(held)
        return need + len(self.running) <= self.pool.available or not self.running

    def _reuse(self, sequence: TokenSequence) -> None:
        """Assign cached blocks to the first tokens of a sequence (prefix caching).

        Full blocks are shared. A block that matches partially is copied, if another is free: the sequence will write
        to the copy.
        """
        match = self.pool.match(sequence.tokens, sequence.root)
        for node in match.nodes:
            self.pool.share(node.page)
            sequence.pages.append(node.page)
        sequence.computed, sequence.registered = len(match.nodes) * self.pool.size, len(match.nodes)
        sequence.prefix = match.nodes[-1] if match.nodes else sequence.root or self.pool.root
        if match.tail is not None:
            source = match.tail.page
            self.pool.share(source)  # protects it from eviction in `take`
            if self.pool.available:
                copy = self.pool.take()
                self._copy(source, copy)
                sequence.pages.append(copy)
                sequence.computed += match.partial
            self.pool.release(source)
        sequence.reused = sequence.computed

    def _preempt(self, sequence: TokenSequence) -> None:
        """Preempt a running sequence: release its blocks, keep its tokens, and queue it in order of arrival."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._drop(sequence)
        place = next((i for i, other in enumerate(self.waiting) if other.arrival > sequence.arrival), len(self.waiting))
        self.waiting.insert(place, sequence)

    def _drop(self, sequence: TokenSequence) -> None:
        """Release the blocks of a sequence to the pool, and reset its progress."""
        for page in reversed(sequence.pages):  # last block first, so that it is evicted first and prefixes stay long
            self.pool.release(page)
        sequence.pages, sequence.computed, sequence.prefix, sequence.registered = [], 0, None, 0
