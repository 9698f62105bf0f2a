"""Plans the rows of the next pass: continuous batching over pages. Independent of tensors and models."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from deepspeed.inference.executors.ragged_batch import BatchSlice
from deepspeed.inference.kv_cache import BlockPool, PrefixBlock


@dataclass(eq=False)
class TokenSequence:
    """A sequence: its tokens so far, of which the first `computed` have keys and values in `pages`."""

    ident: Hashable
    tokens: list[int]
    arrival: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    node: PrefixBlock | None = None
    known: int = 0  # leading pages that can be found by their tokens, or were given up for that
    reused: int = 0

    @property
    def pending(self) -> int:
        """Tokens without keys and values: one while it generates."""
        return len(self.tokens) - self.computed


class Scheduler:
    """Oldest first; sequences that generate before those whose prompt is read, prompts in chunks; room by pages.

    Every plan of a scheduler that is not idle has at least one row: the oldest sequence is never preempted for
    another, and alone it fits (`fits`), so it ends; then the next one is the oldest.

    Args:
        copy: called with (from, to) when a page's content has to be copied, before the next pass.
        max_tokens: rows of a pass, and at least `max_sequences`, those that run at once.
        chunk: rows of prompts in a pass while others generate, which bounds how long they wait; of a pair, twice as
            many as others generate, from the first number to the second. None: all.
    """

    def __init__(
        self,
        pages: BlockPool,
        copy: Callable[[int, int], None],
        max_tokens: int = 768,
        max_sequences: int = 512,
        chunk: int | tuple[int, int] | None = None,
    ) -> None:
        self.pages, self._copy = pages, copy
        self.max_tokens, self.max_sequences = max_tokens, min(max_sequences, max_tokens)
        chunk = max_tokens if chunk is None else chunk
        self.least, self.most = (chunk, chunk) if isinstance(chunk, int) else chunk
        self.running: list[TokenSequence] = []
        self.waiting: deque[TokenSequence] = deque()
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        """Nothing runs or waits."""
        return not self.running and not self.waiting

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens fits into the cache alone."""
        return self._pages_for(tokens) <= self.pages.count

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait for its turn."""
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence that is done or cancelled; its pages are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop(sequence)

    def plan(self, drafts: Callable[[TokenSequence, int], Sequence[int]] | None = None) -> list[BatchSlice]:
        """The rows of the next pass; pages for them are taken. `drafts` guesses at most so many tokens that follow a
        sequence which generates."""
        before = self.preemptions
        slices: dict[TokenSequence, BatchSlice] = {}
        left = self.max_tokens
        order = sorted(self.running, key=lambda sequence: (sequence.pending > 1, sequence.arrival))
        streams = sum(sequence.pending == 1 for sequence in order)
        chunk = min(self.most, max(self.least, 2 * streams)) if streams else self.max_tokens
        for number, sequence in enumerate(order):
            if not left:
                break
            if self.preemptions > before and sequence not in self.running:  # preempted for an older one
                continue
            if sequence.pending > 1:
                chunk -= self._take(sequence, min(sequence.pending, left, chunk), (), slices)
            else:
                spare = left - (len(order) - number)
                guesses = drafts(sequence, spare) if drafts is not None and spare > 0 else ()
                self._take(sequence, 1, guesses, slices)
            if self.preemptions > before:  # slices may have gone
                left = self.max_tokens - sum(len(rows.tokens) for rows in slices.values())
            elif sequence in slices:
                left -= len(slices[sequence].tokens)
        if self.preemptions == before:
            self._admit(slices, left, chunk)
        return [slices[sequence] for sequence in sorted(slices, key=lambda sequence: sequence.arrival)]

    def advance(self, rows: BatchSlice, accepted: Sequence[int]) -> None:
        """After the pass: note what was computed, and append `accepted` tokens (drafts that held, and the next)."""
        sequence = rows.sequence
        sequence.computed = rows.start + rows.count + max(len(accepted) - 1, 0)
        sequence.tokens += accepted
        size = self.pages.size
        while sequence.node is not None and (sequence.known + 1) * size <= sequence.computed:
            first = sequence.known * size
            page_tokens, page = sequence.tokens[first : first + size], sequence.pages[sequence.known]
            sequence.node = self.pages.remember(sequence.node, page_tokens, page)
            sequence.known += 1

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.size)

    def _take(
        self, sequence: TokenSequence, count: int, drafts: Sequence[int], slices: dict[TokenSequence, BatchSlice]
    ) -> int:
        """Put `count` rows and drafts into the pass; returns `count`. The youngest sequence is preempted when pages run
        out; 0 if that is this one."""
        if count <= 0:
            return 0
        start = sequence.computed
        if drafts and self._pages_for(start + count + len(drafts)) - len(sequence.pages) > self.pages.available:
            drafts = ()  # a guess is worth no preemption
        need = self._pages_for(start + count + len(drafts))
        while need - len(sequence.pages) > self.pages.available:
            youngest = self.running[-1]
            self._preempt(youngest)
            slices.pop(youngest, None)
            if youngest is sequence:
                return 0
        while len(sequence.pages) < need:
            sequence.pages.append(self.pages.take())
        tokens = [*sequence.tokens[start : start + count], *drafts]
        wanted = 1 + len(drafts) if start + count == len(sequence.tokens) else 0
        slices[sequence] = BatchSlice(tokens, start, sequence.pages, wanted, sequence)
        return count

    def _admit(self, slices: dict[TokenSequence, BatchSlice], left: int, chunk: int) -> None:
        while self.waiting and len(self.running) < self.max_sequences and min(left, chunk) > 0:
            sequence = self.waiting[0]
            if not self._room_for(sequence):
                return
            self.waiting.popleft()
            bisect.insort(self.running, sequence, key=lambda other: other.arrival)
            self._reuse(sequence)
            took = self._take(sequence, min(sequence.pending, left, chunk), (), slices)
            if not took:  # its pages went to the copy of a shared one; the next plan has room
                return
            left, chunk = left - took, chunk - took

    def _room_for(self, sequence: TokenSequence) -> bool:
        """Room for all its tokens, and a page for each that runs already: so that it is not preempted at once."""
        held = {node.page for node in self.pages.match(sequence.tokens).nodes if self.pages.references(node.page)}
        need = self._pages_for(len(sequence.tokens)) - len(held)
        return need + len(self.running) <= self.pages.available or not self.running

    def _reuse(self, sequence: TokenSequence) -> None:
        """Begin with pages that hold the same tokens."""
        match = self.pages.match(sequence.tokens)
        for node in match.nodes:
            self.pages.share(node.page)
            sequence.pages.append(node.page)
        sequence.computed, sequence.known = len(match.nodes) * self.pages.size, len(match.nodes)
        sequence.node = match.nodes[-1] if match.nodes else self.pages.root
        if match.tail is not None:
            source = match.tail.page
            self.pages.share(source)  # not to be taken for its own copy
            if self.pages.available:
                copy = self.pages.take()
                self._copy(source, copy)
                sequence.pages.append(copy)
                sequence.computed += match.partial
            self.pages.release(source)
        sequence.reused = sequence.computed

    def _preempt(self, sequence: TokenSequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._drop(sequence)
        place = next((i for i, other in enumerate(self.waiting) if other.arrival > sequence.arrival), len(self.waiting))
        self.waiting.insert(place, sequence)

    def _drop(self, sequence: TokenSequence) -> None:
        for page in reversed(sequence.pages):  # the end is given up first
            self.pages.release(page)
        sequence.pages, sequence.computed, sequence.node, sequence.known = [], 0, None, 0
