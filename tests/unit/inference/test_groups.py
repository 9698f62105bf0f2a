"""Groups of sequences that share pages, on the scheduler as a state machine: answers to one prompt, and beams."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from deepspeed.inference.beam_search import BeamGroup
from deepspeed.inference.scheduler import SequenceGroup, TokenSequence
from tests.unit.inference.test_scheduler import Machine, _next


class Search:
    """A beam search that draws its beams; `step` is False at its end."""

    def __init__(self, beams: int, new: int, rng: random.Random) -> None:
        self.sampling, self.left, self.rng = SimpleNamespace(beams=beams), new, rng

    def step(self, logits: torch.Tensor) -> bool:
        beams, self.left = self.sampling.beams, self.left - 1
        assert len(logits) == beams
        self.parents = [self.rng.randrange(beams) for _ in range(beams)]
        self.tokens = [self.rng.randrange(5) for _ in range(beams)]
        return self.left > 0


class GroupMachine(Machine):
    """A machine with groups; the content of pages is compared with the tokens of whoever reads them."""

    def __init__(self, seed: int, *sizes) -> None:
        super().__init__(*sizes)
        self.rng, self.computed = random.Random(seed), 0

    def submit_answers(self, name: str, tokens: list[int], new: int, count: int) -> None:
        group = SequenceGroup(len(tokens))
        for number in range(count):
            self.submit(f"{name}.{number}", tokens, new)
            track = self.tracks[f"{name}.{number}"]
            track.group = group
            group.members.append(track)

    def submit_beams(self, name: str, tokens: list[int], new: int, beams: int) -> None:
        if not self.scheduler.fits(len(tokens) + new, beams, len(tokens)):
            return
        lead = TokenSequence(name, list(tokens), len(self.goals))
        lead.group = BeamGroup(Search(beams, new, self.rng), lead)  # type: ignore[arg-type]
        self.tracks[name], self.goals[name] = lead, 0  # no drafts
        self.scheduler.add(lead)

    def _compute(self, share) -> None:
        track = share.sequence
        self.computed += len(share.tokens)
        if isinstance(track.group, BeamGroup):
            self._compute_beam(share)
            return
        waiting = [t for t in track.group.members if t in self.scheduler.waiting] if track.group is not None else []
        begins = track.group is not None and len(track.tokens) == track.group.common
        super()._compute(share)
        for other in waiting if begins and share.wanted else ():
            if len(other.tokens) == other.group.common and track in self.scheduler.running:
                if self.scheduler.fork(track, other, other.group.common):
                    other.tokens.append(_next(other.tokens))
                    if len(other.tokens) >= self.goals[other.ident]:
                        self.finish(other.ident)

    def _compute_beam(self, share) -> None:
        track, size, group = share.sequence, self.pages.size, share.sequence.group
        if group.lead.ident not in self.tracks:
            return
        if share.pages is track.pages:
            for at, token in enumerate(share.tokens, share.start):
                assert self.pages.writable(share.pages[at // size]), "a write to a page that others read"
                self.content[share.pages[at // size]][at % size] = (at, token)
            seen = [self.content[page][i] for page in share.pages for i in range(size)][: share.end]
            assert seen == list(enumerate(track.tokens[: share.end])), "a stale page was read"
        if not group.take(share, torch.zeros(share.wanted, 3), self.scheduler):
            self.finish(group.lead.ident)

    def plain_step(self) -> None:
        """A step without drafts."""
        self.steps = 0
        self.step()

    def finish(self, ident: str) -> None:
        track = self.tracks.pop(ident)
        for member in list(track.group.members) if isinstance(track.group, BeamGroup) else [track]:
            self.scheduler.remove(member)

    def check(self) -> None:
        held: dict[int, int] = {}
        for track in self.scheduler.running:
            for page in track.pages:
                held[page] = held.get(page, 0) + 1
        assert all(self.pages.references(page) == held.get(page, 0) for page in range(self.pages.count))
        assert self.pages.available == self.pages.count - len(held), "a page was lost or given twice"
        assert all(not track.pages for track in self.scheduler.waiting)
        assert len(self.scheduler.running) <= self.scheduler.max_sequences


def random_run(seed: int) -> tuple[int, int]:
    """(preemptions, steps) of groups, beams and single sequences in random order, with cancels."""
    rng = random.Random(seed)
    size, reuse = rng.choice([1, 2, 3, 4]), rng.random() < 0.5
    pages = rng.choice([16, 18, 24]) // size
    rows, sequences, chunk = rng.choice([4, 7, 30]), rng.choice([3, 4, 9]), rng.choice([None, 2])
    machine = GroupMachine(seed, pages, size, rows, sequences, chunk, reuse)
    for number in range(20):
        event, tokens = rng.choice(["step"] * 5 + ["answers", "beams", "one", "cancel"]), rng.choices(range(5), k=9)
        tokens = tokens[: rng.randint(1, 9)]
        if event == "answers":
            machine.submit_answers(str(number), tokens, rng.randint(1, 5), rng.randint(2, 5))
        elif event == "beams":
            machine.submit_beams(str(number), tokens, rng.randint(1, 6), rng.randint(2, 3))
        elif event == "one":
            machine.submit(str(number), tokens, 3)
        elif event == "cancel" and machine.tracks:
            machine.finish(rng.choice(sorted(machine.tracks)))
        elif not machine.scheduler.idle:
            machine.step(rng.random() < 0.5)
        machine.check()
    bound = 3000
    while not machine.scheduler.idle and bound:
        machine.step()
        bound -= 1
    assert machine.scheduler.idle, "no progress"
    assert machine.pages.available == machine.pages.count
    return machine.scheduler.preemptions, machine.steps


def test_groups_in_every_order_keep_the_pages_and_progress() -> None:
    preempted, steps = 0, 0
    for seed in range(300):
        found = random_run(seed)
        preempted, steps = preempted + found[0], steps + found[1]
    assert preempted > 50 and steps > 2000


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("reuse", [True, False])
def test_answers_compute_the_prompt_once_and_share_its_pages(length: int, reuse: bool) -> None:
    machine = GroupMachine(0, 40, 4, 30, 8, None, reuse)
    machine.submit_answers("a", list(range(length)), 3, 5)
    machine.plain_step()
    assert machine.computed == length and len(machine.scheduler.running) == 5
    pages = [track.pages for track in machine.scheduler.running]
    assert all(each == pages[0] for each in pages), "also the last page, which is not full"
    machine.plain_step()
    assert machine.computed == length + 5
    pages = [track.pages for track in machine.scheduler.running]
    assert len({each[0] for each in pages}) == 1 and len({each[-1] for each in pages}) == 5
    assert machine.pages.count - machine.pages.available == length // 4 + 5


def test_one_that_comes_late_or_is_left_takes_the_pages_too() -> None:
    machine = GroupMachine(0, 40, 4, 30, 2, None, False)
    machine.submit_answers("a", list(range(9)), 5, 3)
    machine.plain_step()
    assert machine.computed == 9 and len(machine.scheduler.running) == 2
    machine.finish("a.0")
    machine.plain_step()
    assert machine.computed == 9 + 2, "the last token of the prompt, for its logits, and one of the other"
    first, second = machine.scheduler.running
    assert first.pages[:2] == second.pages[:2] and second.reused == 8
