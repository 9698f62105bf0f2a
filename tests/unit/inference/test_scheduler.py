"""The scheduler as a state machine, on sizes small enough to see every order of events."""

from __future__ import annotations

import itertools

import pytest

from deepspeed.errors import MemoryExhaustedError, UsageError
from deepspeed.inference import Generator
from deepspeed.inference.kv_cache import BlockPool
from deepspeed.inference.scheduler import Scheduler, TokenSequence
from tests.unit.inference.toys import llama


class Machine:
    """A scheduler whose pages have content: the tokens that a model would have written, and what it would read."""

    def __init__(self, pages: int, size: int, tokens: int, sequences: int, chunk: int | None, reuse: bool) -> None:
        self.content = [[None] * size for _ in range(pages)]
        self.pages = BlockPool(pages, size, reuse)
        self.scheduler = Scheduler(self.pages, self._copy, tokens, sequences, chunk)
        self.goals: dict[str, int] = {}
        self.tracks: dict[str, TokenSequence] = {}
        self.steps = 0

    def _copy(self, source: int, target: int) -> None:
        self.content[target] = list(self.content[source])

    def submit(self, ident: str, tokens: list[int], new: int, priority: int = 0) -> None:
        track = TokenSequence(ident, list(tokens), len(self.goals), priority=priority)
        self.tracks[ident], self.goals[ident] = track, len(tokens) + new
        self.scheduler.add(track)

    def step(self, wrong_drafts: bool = False) -> None:
        def drafts(track, most):
            right = [_next(track.tokens), _next([*track.tokens, _next(track.tokens)])]
            left = max(min(most, self.goals[track.ident] - len(track.tokens)), 0)
            return ([right[0], 99] if wrong_drafts else right)[:left]

        shares = self.scheduler.plan(drafts if self.steps % 2 else None)
        assert shares, "a step without progress"
        assert sum(len(share.tokens) for share in shares) <= self.scheduler.max_tokens
        assert len(shares) <= self.scheduler.max_sequences
        for share in shares:
            self._compute(share)
        self.steps += 1
        self.check()

    def _compute(self, share) -> None:
        track, size = share.sequence, self.pages.size
        fed = [*track.tokens[share.start : share.start + share.count], *share.drafts]
        for at, token in enumerate(fed, share.start):
            page = track.pages[at // size]
            assert self.pages.writable(page), "a write to a page that others read"
            self.content[page][at % size] = (at, token)
        seen = [self.content[page][i] for page in track.pages for i in range(size)][: share.start + len(fed)]
        assert seen == list(enumerate([*track.tokens[: share.start], *fed])), "a stale page was read"
        accepted = []
        if share.wanted:
            known = list(track.tokens)
            for draft in [*share.drafts, None]:
                accepted.append(_next(known))
                known.append(accepted[-1])
                if draft != accepted[-1]:
                    break
            accepted = accepted[: self.goals[track.ident] - len(track.tokens)]
        self.scheduler.advance(share, accepted)
        if len(track.tokens) >= self.goals[track.ident]:
            self.finish(track.ident)

    def finish(self, ident: str) -> None:
        self.scheduler.remove(self.tracks.pop(ident))

    def check(self) -> None:
        held: dict[int, int] = {}
        for track in self.scheduler.running:
            for page in track.pages:
                held[page] = held.get(page, 0) + 1
        assert all(self.pages.references(page) == held.get(page, 0) for page in range(self.pages.count))
        assert self.pages.available == self.pages.count - len(held), "a page was lost or given twice"
        assert all(not track.pages for track in self.scheduler.waiting)
        assert [t.rank for t in self.scheduler.running] == sorted(t.rank for t in self.scheduler.running)
        waiting = [t.rank for t in self.scheduler.waiting]
        assert waiting == sorted(waiting)


def _next(tokens: list[int]) -> int:
    return (sum(tokens) * 7 + len(tokens)) % 5


PROMPTS = ([1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 1, 3, 3], [4], [1, 2, 3])
FULL = [(size, reuse, 5 if size == 2 else 4) for size in (1, 2, 3) for reuse in (True, False)]
EVENTS = ("step", "step wrong", "submit", "cancel oldest", "cancel youngest")


@pytest.mark.parametrize(
    ("size", "reuse", "length"),
    [(2, True, 3), (1, False, 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in FULL)],
)
def test_every_order_of_events_progresses_and_keeps_the_pages(size: int, reuse: bool, length: int) -> None:
    states = 0
    for pages, tokens, sequences, chunk in itertools.product((9 // size, 14 // size), (2, 5), (2, 3), (None, 2)):
        if pages * size < 9:
            continue
        for events in itertools.product(EVENTS, repeat=length):
            if "submit" not in events:
                continue
            machine = Machine(pages, size, tokens, sequences, chunk, reuse)
            left = list(PROMPTS)
            machine.submit("first", left.pop(0), 3)
            for number, event in enumerate(events):
                _do(machine, event, number, left)
                machine.check()
            bound = 60
            while not machine.scheduler.idle and bound:
                machine.step()
                bound -= 1
            assert machine.scheduler.idle, f"not done after 60 more steps: {events}"
            assert machine.pages.available == machine.pages.count
            states += machine.steps
    assert states > 1_000 * (1 if length == 3 else 10)


def _do(machine: Machine, event: str, number: int, left: list[list[int]]) -> None:
    if event.startswith("step"):
        if not machine.scheduler.idle:
            machine.step(event == "step wrong")
    elif event == "submit":
        for copy in range(2 if number % 2 else 1):
            machine.submit(f"{number}.{copy}", left[0], 2 + number % 2)
        left.append(left.pop(0))
    elif machine.tracks:
        names = sorted(machine.tracks, key=lambda ident: machine.tracks[ident].arrival)
        machine.finish(names[0 if event.endswith("oldest") else -1])


def test_a_thousand_unlike_prompts_leave_nothing_behind() -> None:
    machine = Machine(12, 4, 16, 4, None, True)
    for number in range(1000):
        machine.submit(str(number), [number, 1, 2, 3, number, 5], 3)
        while machine.tracks and (number % 3 == 0 or len(machine.tracks) > 6):
            machine.step()
    while not machine.scheduler.idle:
        machine.step()
    assert machine.pages.available == 12 and len(machine.pages._nodes) <= 12
    machine.pages.forget_all()
    assert not machine.pages._nodes and not machine.pages.root.children and not machine.pages.root.by_first


def test_tokens_are_compared_not_only_their_hashes() -> None:
    assert hash((2**61 - 1, 7)) == hash((0, 7))  # tokens of one hash
    pages = BlockPool(4, 2)
    pages.remember(pages.root, [0, 7], pages.take())
    assert not pages.match([2**61 - 1, 7, 3]).nodes
    assert pages.match([0, 7, 3]).nodes


def test_two_of_one_prompt_share_its_pages_and_copy_the_page_they_write() -> None:
    machine = Machine(20, 4, 32, 4, None, True)
    machine.submit("a", [1, 2, 3, 4, 5, 6, 7, 8], 5)
    machine.step()
    machine.submit("b", [1, 2, 3, 4, 5, 6, 7, 8], 5)
    machine.submit("c", [1, 2, 3, 4, 5, 6, 9, 8], 5)
    machine.step()
    a, b, c = (machine.tracks[name] for name in "abc")
    assert b.pages[0] == c.pages[0] == a.pages[0] and machine.pages.references(a.pages[0]) == 3
    assert b.reused == 7 and c.reused == 6 and len({a.pages[1], b.pages[1], c.pages[1]}) == 3


def test_a_page_is_released_once_and_taken_while_there_is_one() -> None:
    pages = BlockPool(1, 4)
    page = pages.take()
    with pytest.raises(MemoryExhaustedError, match="cache_bytes"):
        pages.take()
    pages.release(page)
    with pytest.raises(UsageError, match="not in use"):
        pages.release(page)
    with pytest.raises(UsageError, match="not in use"):
        pages.release(7)


@pytest.mark.parametrize(("streams", "rows"), [(0, 60), (1, 16), (8, 16), (12, 24), (20, 40)])
def test_a_prompt_beside_streams_takes_rows_as_they_are_many(streams: int, rows: int) -> None:
    generator = Generator(llama(), max_batch_tokens=60)
    scheduler = generator._scheduler
    for number in range(streams):
        scheduler.add(TokenSequence(number, [7], number))
    for share in scheduler.plan():
        scheduler.advance(share, [5])
    long = TokenSequence("long", [3] * 100, streams)
    scheduler.add(long)
    assert {share.sequence.ident: share.count for share in scheduler.plan()} == dict.fromkeys(range(streams), 1) | {
        "long": rows
    }


@pytest.mark.parametrize(
    ("decoding", "prompts", "rows"),
    [(1, 1, 16), (1, 3, 48), (1, 20, 128), (8, 1, 16), (20, 1, 40), (20, 4, 64), (0, 20, 600), (100, 1, 128)],
)
def test_prompt_rows_beside_decoding_sequences(decoding: int, prompts: int, rows: int) -> None:
    """One prompt hardly delays others, and a burst of prompts does not wait behind a few others."""
    scheduler = Scheduler(BlockPool(800, 16), lambda *_: None, 600, 512, (16, 128))
    for number in range(decoding):
        scheduler.add(TokenSequence(f"old {number}", [1, 2], number))
    if decoding:
        for share in scheduler.plan():
            share.sequence.computed += share.count
            share.sequence.tokens.append(3)
    for number in range(prompts):
        scheduler.add(TokenSequence(f"new {number}", [4] * 200, decoding + number))
    assert sum(len(share.tokens) for share in scheduler.plan()) == decoding + rows


def test_prompts_that_cannot_be_admitted_count_for_nothing() -> None:
    scheduler = Scheduler(BlockPool(800, 16), lambda *_: None, 600, 2, (16, 128))
    scheduler.add(TokenSequence("old", [1, 2], 0))
    for share in scheduler.plan():
        share.sequence.computed += share.count
        share.sequence.tokens.append(3)
    for number in range(5):
        scheduler.add(TokenSequence(f"new {number}", [4] * 200, 1 + number))
    assert sum(len(share.tokens) for share in scheduler.plan()) == 1 + 16
