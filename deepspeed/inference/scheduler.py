"""Which rows go into the next pass: continuous batching over pages. No tensors, no model."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

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
    prompt: int = 0
    reused: int = 0

    @property
    def pending(self) -> int:
        """Tokens without keys and values: one while it generates."""
        return len(self.tokens) - self.computed


@dataclass
class ScheduledTokens:
    """Rows of one sequence in a pass: its tokens from `start` on, then drafts. Only with the last known token in it
    (`complete`) do its logits matter: those of the last token and of each draft."""

    track: TokenSequence
    start: int
    count: int
    drafts: Sequence[int] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing of the sequence stays to be computed."""
        return self.start + self.count == len(self.track.tokens)

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return self.count + len(self.drafts)


class Scheduler:
    """Oldest first; sequences that generate before those whose prompt is read, prompts in chunks; room by pages.

    Every plan of a scheduler that is not idle has at least one row: the oldest sequence is never preempted for
    another, and alone it fits (`fits`), so it ends; then the next one is the oldest.

    Args:
        pages: of the cache.
        copy: called with (from, to) when a page's content has to be copied, before the next pass.
        max_tokens: rows of a pass.
        max_sequences: sequences that run at once; at most `max_tokens`.
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

    def add(self, track: TokenSequence) -> None:
        """Let a sequence wait for its turn."""
        track.prompt = track.prompt or len(track.tokens)
        self.waiting.append(track)

    def remove(self, track: TokenSequence) -> None:
        """Forget a sequence that is done or cancelled; its pages are free at once."""
        if track in self.running:
            self.running.remove(track)
        else:
            self.waiting.remove(track)
        self._drop(track)

    def plan(self, drafts: Callable[[TokenSequence, int], Sequence[int]] | None = None) -> list[ScheduledTokens]:
        """The rows of the next pass; pages for them are taken.

        Args:
            drafts: guesses of what follows a sequence that generates, at most so many.
        """
        before = self.preemptions
        shares: dict[TokenSequence, ScheduledTokens] = {}
        left = self.max_tokens
        order = sorted(self.running, key=lambda track: (track.pending > 1, track.arrival))
        streams = sum(track.pending == 1 for track in order)
        chunk = min(self.most, max(self.least, 2 * streams)) if streams else self.max_tokens
        for number, track in enumerate(order):
            if not left:
                break
            if self.preemptions > before and track not in self.running:  # preempted for an older one
                continue
            if track.pending > 1:
                chunk -= self._read(track, min(left, chunk), shares)
            else:
                spare = left - (len(order) - number)
                guesses = drafts(track, spare) if drafts is not None and spare > 0 else ()
                self._take(track, 1, guesses, shares)
            if self.preemptions > before:  # shares may have gone
                left = self.max_tokens - sum(share.rows for share in shares.values())
            elif track in shares:
                left -= shares[track].rows
        if self.preemptions == before:
            self._admit(shares, left, chunk)
        return [shares[track] for track in sorted(shares, key=lambda track: track.arrival)]

    def advance(self, share: ScheduledTokens, accepted: Sequence[int]) -> None:
        """After the pass: note what was computed, and append `accepted` tokens (drafts that held, and the next)."""
        track = share.track
        held = max(len(accepted) - 1, 0)
        track.computed = share.start + share.count + held
        track.tokens += accepted
        size = self.pages.size
        while track.node is not None and (track.known + 1) * size <= track.computed:
            at = track.known * size
            track.node = self.pages.remember(track.node, track.tokens[at : at + size], track.pages[track.known])
            track.known += 1

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.size)

    def _read(self, track: TokenSequence, most: int, shares: dict[TokenSequence, ScheduledTokens]) -> int:
        count = min(track.pending, most)
        return count if count > 0 and self._take(track, count, (), shares) else 0

    def _take(
        self, track: TokenSequence, count: int, drafts: Sequence[int], shares: dict[TokenSequence, ScheduledTokens]
    ) -> bool:
        """Put rows into the pass. The youngest goes when pages run out; False if that is the sequence itself."""
        start = track.computed
        if drafts and self._pages_for(start + count + len(drafts)) - len(track.pages) > self.pages.available:
            drafts = ()  # a guess is worth no preemption
        need = self._pages_for(start + count + len(drafts))
        while need - len(track.pages) > self.pages.available:
            youngest = self.running[-1]
            self._preempt(youngest)
            shares.pop(youngest, None)
            if youngest is track:
                return False
        while len(track.pages) < need:
            track.pages.append(self.pages.take())
        shares[track] = ScheduledTokens(track, start, count, drafts)
        return True

    def _admit(self, shares: dict[TokenSequence, ScheduledTokens], left: int, chunk: int) -> None:
        while self.waiting and len(self.running) < self.max_sequences and min(left, chunk) > 0:
            track = self.waiting[0]
            if not self._room_for(track):
                return
            self.waiting.popleft()
            bisect.insort(self.running, track, key=lambda one: one.arrival)
            self._reuse(track)
            took = self._read(track, min(left, chunk), shares)
            if not took:  # its pages went to the copy of a shared one; the next plan has room
                return
            left, chunk = left - took, chunk - took

    def _room_for(self, track: TokenSequence) -> bool:
        """Room for all its tokens, and a page for each that runs already: so that it is not preempted at once."""
        held = {node.page for node in self.pages.match(track.tokens).nodes if self.pages.holders(node.page)}
        need = self._pages_for(len(track.tokens)) - len(held)
        return need + len(self.running) <= self.pages.available or not self.running

    def _reuse(self, track: TokenSequence) -> None:
        """Begin with pages that hold the same tokens."""
        match = self.pages.match(track.tokens)
        for node in match.nodes:
            self.pages.share(node.page)
            track.pages.append(node.page)
        track.computed, track.known = len(match.nodes) * self.pages.size, len(match.nodes)
        track.node = match.nodes[-1] if match.nodes else self.pages.root
        if match.tail is not None:
            source = match.tail.page
            self.pages.share(source)  # not to be taken for its own copy
            if self.pages.available:
                copy = self.pages.take()
                self._copy(source, copy)
                track.pages.append(copy)
                track.computed += match.partial
            self.pages.release(source)
        track.reused = track.computed

    def _preempt(self, track: TokenSequence) -> None:
        self.preemptions += 1
        self.running.remove(track)
        self._drop(track)
        place = next((i for i, other in enumerate(self.waiting) if other.arrival > track.arrival), len(self.waiting))
        self.waiting.insert(place, track)

    def _drop(self, track: TokenSequence) -> None:
        for page in reversed(track.pages):  # the end is given up first
            self.pages.release(page)
        track.pages, track.computed, track.node, track.known = [], 0, None, 0
