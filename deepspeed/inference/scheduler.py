"""Scheduler of forward passes: continuous batching with chunked prefill; each token is a row of a pass.

Blocks of the KV cache are also called pages (`kv_cache.py`). The scheduler creates no tensors and is independent of
the model.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.inference.executors.ragged_batch import BatchSlice
from deepspeed.inference.kv_cache import BlockPool, Match, PrefixBlock


@dataclass(eq=False)
class SequenceGroup:
    """Sequences with the same first tokens, which share the pages of these: answers to one prompt, or beams.

    While one of them computes the common tokens, the others wait; then they begin on its pages.

    Attributes:
        common: number of first tokens that are the same in all members.
        members: running and waiting sequences.
    """

    common: int
    members: list[TokenSequence] = field(default_factory=list)


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
    group: SequenceGroup | None = None
    adapter: Any = None  # `LoraAdapter` of its rows; None: the model alone
    root: PrefixBlock | None = None  # of the prefix tree for its adapter; None: the pool's own
    priority: int = 0  # lower numbers come first
    # Number of first rows that this sequence computes itself, since their logits or hidden states are requested, which
    # cached pages lack; and how many of them are done.
    own_rows: int = 0
    own_done: int = 0
    hidden: bool = False  # whether hidden states are requested in place of logits
    cached: int | None = None  # `reused` of the first admission; None: not admitted yet

    @property
    def rank(self) -> tuple[int, int]:
        """Place in the order of sequences: by priority, then by arrival."""
        return self.priority, self.arrival

    @property
    def pending(self) -> int:
        """Number of tokens without keys and values."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether the sequence is decoding: exactly one token has no keys and values. Otherwise it is in prefill."""
        return len(self.tokens) - self.computed == 1


class Scheduler:
    """Scheduler that plans decoding sequences before sequences in prefill, in the order of their rank.

    Those with the lowest priority number come first, then the oldest. Prefill is split into chunks. Blocks are
    allocated when tokens need them. When the pool has no block left, the last running sequence is preempted: its
    blocks return to the pool, and the sequence returns to the queue. A waiting sequence also preempts running ones with
    a higher priority number if it cannot be admitted beside them.

    Args:
        pool: the block pool.
        copy: function (from, to) that copies the content of a block before the next pass.
        max_tokens: maximum number of rows in a pass.
        max_sequences: maximum number of running sequences; values above `max_tokens` are reduced to it.
        chunk: maximum number of prefill rows in a pass with decoding sequences. A pair (low, high): `low` for each
            sequence that waits for its first token, at least twice the number of decoding sequences, and at most
            `high`. So a long prompt hardly delays others, and a burst of prompts does not wait behind a few others.
            None: no limit but `max_tokens`.
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
        self.running: list[TokenSequence] = []  # in order of rank
        self.waiting: deque[TokenSequence] = deque()  # in order of rank
        self.preemptions = 0
        self.looked_up = self.reused = 0  # tokens of admitted prompts looked up in the prefix cache, and found there

    @property
    def idle(self) -> bool:
        """Whether there are neither running nor waiting sequences."""
        return not self.running and not self.waiting

    def fits(self, tokens: int, beams: int = 1, common: int = 0) -> bool:
        """Whether `beams` sequences of this many tokens, of which the first `common` are shared, fit into the cache."""
        shared = common // self.pool.size
        return shared + beams * (self._pages_for(tokens) - shared) <= self.pool.count

    def add(self, sequence: TokenSequence) -> None:
        """Insert a sequence in the queue by its rank; the caller has to check `fits` for its maximum length."""
        self._queue(sequence)
        if sequence.group is not None:
            sequence.group.members.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a finished or cancelled sequence; its blocks return to the pool at once."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.group is not None:
            sequence.group.members.remove(sequence)
        self._drop(sequence)

    def fork(self, source: TokenSequence, target: TokenSequence, length: int) -> bool:
        """Let `target` continue after the first `length` tokens of `source`, on the same pages.

        A full page stays shared; the last one is copied when one of its sequences writes to it. What `target` had
        computed before is dropped. A new `target` joins its group.

        Args:
            source: sequence of which `length` tokens are computed, or a waiting one.
            target: running, waiting or new sequence. Its `tokens` begin with those of `source`.
            length: number of shared tokens.

        Returns:
            Whether `target` runs; otherwise it waits, since no further sequence may run or the pool is short of blocks.
        """
        if target.group is not None and target not in target.group.members:
            target.group.members.append(target)
        runs = target in self.running
        waits = not runs and target in self.waiting
        if not source.computed or not (runs or self._may_run(target)):
            if runs:
                self.running.remove(target)
                self._drop(target)
            if not waits:
                self._queue(target)
            return False
        if waits:
            self.waiting.remove(target)
        if not runs:
            bisect.insort(self.running, target, key=lambda other: other.rank)
        before = target.pages
        self._share(source, target, length)
        for page in reversed(before):
            self.pool.release(page)
        return True

    def rewind(self, sequence: TokenSequence, length: int) -> None:
        """Drop keys and values after the first `length` tokens of a sequence."""
        if length >= sequence.computed:
            return
        keep = self._pages_for(length)
        for page in reversed(sequence.pages[keep:]):
            self.pool.release(page)
        del sequence.pages[keep:]
        sequence.computed = length
        self._register_from(sequence, sequence, length)

    def plan(self, drafts: Callable[[TokenSequence, int], Sequence[int]] | None = None) -> list[BatchSlice]:
        """Plan the rows of the next pass and allocate their blocks.

        Args:
            drafts: function (decoding sequence, maximum number) that returns draft tokens; None: no drafts.

        Returns:
            One slice for each sequence in the pass, in order of rank.
        """
        self._make_way()
        before = self.preemptions
        slices: dict[TokenSequence, BatchSlice] = {}
        left = self.max_tokens
        order = sorted(self.running, key=lambda sequence: (not sequence.decodes, sequence.rank))
        decoding = sum(sequence.decodes for sequence in order)
        chunk = self._prefill_rows(decoding)
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
        self._unblock(slices)
        return [slices[sequence] for sequence in sorted(slices, key=lambda sequence: sequence.rank)]

    def _prefill_rows(self, decoding: int) -> int:
        """Return the maximum number of prefill rows in a pass with this number of decoding sequences."""
        if not decoding:
            return self.max_tokens
        admissible = min(len(self.waiting), max(self.max_sequences - len(self.running), 0))
        begin = len(self.running) - decoding + admissible
        return min(self.max_chunk, max(self.min_chunk * max(begin, 1), 2 * decoding))

    def plan_behind(self, slices: Sequence[BatchSlice], count: int) -> list[BatchSlice]:
        """Plan one more token of each sequence behind a pass whose tokens are not known, and allocate its blocks.

        The tokens of the slices are 0, for the caller to replace.

        Args:
            slices: slices of the pass whose sequences go on, each up to the last token of its sequence.
            count: number of sequences in the pass that still run.

        Returns:
            One slice for each of `slices`; empty if another plan may be better: if sequences outside of the pass run,
            waiting ones could be admitted, members of a group share blocks, or blocks are short.
        """
        waits = self.waiting and (
            len(slices) < self.max_sequences or self.waiting[0].priority < self.running[-1].priority
        )
        needs = [self._pages_for(rows.end + 1) - len(rows.sequence.pages) for rows in slices]
        if waits or len(self.running) != count or sum(needs) > self.pool.available:
            return []
        if any(rows.sequence.group is not None for rows in slices):
            return []
        for rows, need in zip(slices, needs, strict=True):
            rows.sequence.pages += [self.pool.take() for _ in range(need)]
        return [BatchSlice([0], rows.end, rows.sequence.pages, sequence=rows.sequence) for rows in slices]

    def advance(self, rows: BatchSlice, accepted: Sequence[int]) -> None:
        """Update a sequence after a pass: count the computed tokens, append new ones, and register full blocks.

        Args:
            rows: slice of the sequence in this pass.
            accepted: accepted drafts and the token after them; empty while the sequence is in prefill.
        """
        sequence = rows.sequence
        sequence.computed = rows.start + rows.count + max(len(accepted) - 1, 0)
        sequence.tokens += accepted
        sequence.own_done = max(sequence.own_done, min(rows.start + rows.count, sequence.own_rows))
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
            `count`; 0 if `count` is not positive, or if this sequence itself was the last and was preempted.
        """
        if count <= 0:
            return 0
        start = sequence.computed
        held = len(sequence.pages) - self._written_by_others(sequence)
        if drafts and self._pages_for(start + count + len(drafts)) - held > self.pool.available:
            drafts = ()  # no preemption for drafts
        need = self._pages_for(start + count + len(drafts))
        while need - len(sequence.pages) + self._written_by_others(sequence) > self.pool.available:
            last = self.running[-1]
            self._preempt(last)
            slices.pop(last, None)  # the victim may be in this pass already
            if last is sequence:
                return 0
        if self._written_by_others(sequence):
            place, page = start // self.pool.size, self.pool.take()
            self._copy(sequence.pages[place], page)
            self.pool.release(sequence.pages[place])
            sequence.pages[place] = page
        while len(sequence.pages) < need:
            sequence.pages.append(self.pool.take())
        tokens = [*sequence.tokens[start : start + count], *drafts]
        # Logits determine the token after a row, so only the last chunk of a prefill needs any; a draft is checked by
        # the token chosen before it. Requests may also want those of their prompt's rows, once.
        logits_wanted = 1 + len(drafts) if start + count == len(sequence.tokens) and not sequence.hidden else 0
        own = max(min(start + count, sequence.own_rows) - max(start, sequence.own_done), 0)
        scored = 0 if sequence.hidden else own
        rows = tokens, start, sequence.pages, logits_wanted + scored, sequence
        slices[sequence] = BatchSlice(*rows, adapter=sequence.adapter, scored=scored, hidden=sequence.hidden)
        return count

    def _written_by_others(self, sequence: TokenSequence) -> bool:
        """Whether the block of the next token has to be copied first, because other sequences read it."""
        place = sequence.computed // self.pool.size
        return place < len(sequence.pages) and not self.pool.writable(sequence.pages[place])

    def _admit(self, slices: dict[TokenSequence, BatchSlice], left: int, chunk: int, reserve: bool = True) -> None:
        """Admit waiting sequences, the first first, while the pass has rows for them and the pool has blocks.

        `reserve`: whether blocks are left for the running sequences.
        """
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_sequences or min(left, chunk) <= 0:
                return
            if self._held_back(sequence):
                continue
            if not self._room_for(sequence, reserve=reserve):
                return
            self._start(sequence)
            scheduled = self._schedule(sequence, min(sequence.pending, left, chunk), (), slices)
            if not scheduled:  # preempted: the copy of a shared block used the last block; the next plan has room
                return
            left, chunk = left - scheduled, chunk - scheduled

    def _unblock(self, slices: dict[TokenSequence, BatchSlice]) -> None:
        """Make room for a waiting sequence if the pass is empty, since all running ones wait for others (beams)."""
        while not slices and self.waiting and not any(sequence.pending for sequence in self.running):
            self._admit(slices, self.max_tokens, self.max_tokens, reserve=False)
            group = self.waiting[0].group if self.waiting else None
            others = [other for other in self.running if group is None or other.group is not group]
            if slices or not self.running:
                return
            self._preempt((others or self.running)[-1])

    def _may_run(self, sequence: TokenSequence) -> bool:
        """Whether one more sequence may run on the blocks of another, with a block left for each running one."""
        return len(self.running) < self.max_sequences and len(self.running) < self.pool.available

    def _source(self, sequence: TokenSequence) -> tuple[TokenSequence | None, int]:
        """Return the running member of the group with the most tokens in common, and the number of computed ones.

        (None, 0): no other member runs, or the sequence has to compute rows itself. The last token of `sequence` never
        counts: its logits must be computed.
        """
        best, length = None, -1
        own = sequence.own_done < sequence.own_rows
        for other in sequence.group.members if sequence.group is not None and not own else ():
            if other is sequence or not other.pages:
                continue
            most = min(other.computed, len(sequence.tokens) - 1)
            same = min(most, sequence.group.common)  # type: ignore[union-attr]
            while same < most and other.tokens[same] == sequence.tokens[same]:
                same += 1
            if same > length:
                best, length = other, same
        return best, max(length, 0)

    def _held_back(self, sequence: TokenSequence) -> bool:
        """Whether a member of its group computes the common tokens of a waiting sequence."""
        source, _ = self._source(sequence)
        return source is not None and source.computed < source.group.common  # type: ignore[union-attr]

    def _start(self, sequence: TokenSequence) -> None:
        """Move a waiting sequence to the running ones."""
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda other: other.rank)
        self._reuse(sequence)

    def _make_way(self) -> None:
        """Admit the first waiting sequence if it precedes running ones by priority, if need be by their preemption."""
        if not self.waiting or not self.running or self.waiting[0].priority >= self.running[-1].priority:
            return
        first = next((sequence for sequence in self.waiting if not self._held_back(sequence)), None)
        if first is None or first.priority >= self.running[-1].priority:
            return
        below = [other for other in self.running if other.priority > first.priority]
        uses = Counter(page for other in below for page in other.pages)
        freed = sum(self.pool.references(page) == count for page, count in uses.items())
        left = len(self.running) - len(below)
        if left >= self.max_sequences or not self._room_for(first, left, freed):
            return  # all of them together would not make enough room
        while len(self.running) >= self.max_sequences or not self._room_for(first):
            if self.running[-1].priority <= first.priority:  # pages that they share with it were counted twice
                return
            self._preempt(self.running[-1])
        self._start(first)

    def _room_for(
        self, sequence: TokenSequence, running: int | None = None, freed: int = 0, reserve: bool = True
    ) -> bool:
        """Whether the pool has blocks for all tokens of a sequence and, with `reserve`, one for each running sequence.

        This avoids immediate preemption. Blocks shared with running sequences need no room. True if none is running.

        Args:
            sequence: a waiting sequence.
            running: number of running sequences; None: those that run.
            freed: number of blocks that are counted besides the available ones.
            reserve: whether a block is left for each running sequence.
        """
        running = len(self.running) if running is None else running
        source, length, match = self._reusable(sequence)
        shared = length // self.pool.size
        if source is None:
            shared = len({node.page for node in match.nodes if self.pool.references(node.page)})
        need = self._pages_for(len(sequence.tokens)) - shared
        return need + (running if reserve else 0) <= self.pool.available + freed or not running

    def _reusable(self, sequence: TokenSequence) -> tuple[TokenSequence | None, int, Match]:
        """Return where first tokens of a sequence are computed: (member of its group, number of tokens, cached blocks).

        The member is None if the cached blocks are to be taken. They are only if they have more tokens, and the common
        ones in the member's blocks: otherwise the group would hold its prompt twice, which `fits` does not count.
        """
        match = self._match(sequence)
        source, length = self._source(sequence)
        if source is None:
            return None, 0, match
        common = source.group.common // self.pool.size  # type: ignore[union-attr]
        same = [node.page for node in match.nodes[:common]] == source.pages[:common]
        longer = len(match.nodes) * self.pool.size + match.partial > length
        return (None, 0, match) if longer and same else (source, length, match)

    def _match(self, sequence: TokenSequence) -> Match:
        """Return the cached blocks for a sequence: none if it has to compute rows itself."""
        tokens = sequence.tokens if sequence.own_done >= sequence.own_rows else sequence.tokens[:1]
        return self.pool.match(tokens, sequence.root)

    def _share(self, source: TokenSequence, target: TokenSequence, length: int) -> None:
        """Give `target` the blocks of the first `length` tokens of `source`; both may have to copy the last one."""
        target.pages = source.pages[: self._pages_for(length)]
        for page in target.pages:
            self.pool.share(page)
        target.computed = length
        self._register_from(source, target, length)

    def _register_from(self, source: TokenSequence, target: TokenSequence, length: int) -> None:
        """Set the place of `target` in the prefix tree, for the first `length` tokens of `source`."""
        node, full = source.prefix, min(source.registered, length // self.pool.size)
        for _ in range(source.registered - full):
            node = node.parent if node is not None else None
        target.prefix, target.registered = node, full

    def _reuse(self, sequence: TokenSequence) -> None:
        """Assign cached blocks to the first tokens of a sequence (prefix caching).

        Those of a running member of its group may be taken instead. Full blocks are shared. A block that matches
        partially is copied, if another is free: the sequence will write to the copy.
        """
        source, length, match = self._reusable(sequence)
        if source is not None:
            self._share(source, sequence, length)
            self._count_reused(sequence)
            return
        for node in match.nodes:
            self.pool.share(node.page)
            sequence.pages.append(node.page)
        sequence.computed, sequence.registered = len(match.nodes) * self.pool.size, len(match.nodes)
        sequence.prefix = match.nodes[-1] if match.nodes else sequence.root or self.pool.root
        if match.tail is not None:
            partial = match.tail.page
            self.pool.share(partial)  # protects it from eviction in `take`
            if self.pool.available:
                copy = self.pool.take()
                self._copy(partial, copy)
                sequence.pages.append(copy)
                sequence.computed += match.partial
            self.pool.release(partial)
        self._count_reused(sequence)

    def _count_reused(self, sequence: TokenSequence) -> None:
        sequence.reused = sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.reused
            self.looked_up += len(sequence.tokens)
            self.reused += sequence.reused

    def _preempt(self, sequence: TokenSequence) -> None:
        """Preempt a running sequence: release its blocks, keep its tokens, and queue it in order of rank."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._drop(sequence)
        self._queue(sequence)

    def _queue(self, sequence: TokenSequence) -> None:
        """Insert a sequence in the queue, in order of rank."""
        if not self.waiting or self.waiting[-1].rank <= sequence.rank:
            self.waiting.append(sequence)
            return
        place = next(i for i, other in enumerate(self.waiting) if other.rank > sequence.rank)
        self.waiting.insert(place, sequence)

    def _drop(self, sequence: TokenSequence) -> None:
        """Release the blocks of a sequence to the pool, and reset its progress."""
        for page in reversed(sequence.pages):  # last block first, so that it is evicted first and prefixes stay long
            self.pool.release(page)
        sequence.pages, sequence.computed, sequence.prefix, sequence.registered = [], 0, None, 0
