"""Beam search with the rules of Transformers' `generate`: scores, order of equal scores, and end.

Beams are a group of sequences in the scheduler. After every member has its logits, the group forks: the best
continuations live on, on shared pages, and members without one take the place of further continuations of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.executors.ragged_batch import BatchSlice
from deepspeed.inference.request import Beam, Logprob
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.inference.scheduler import Scheduler, SequenceGroup, TokenSequence

BARRED = -1e9  # added to scores that must not be chosen


@dataclass(frozen=True, eq=False)
class BeamNode:
    """Last token of a beam, linked to the one before.

    Attributes:
        token: the token; -1 before the first one.
        before: node of the token before; None: this is before the first token.
        logprob: log-probabilities at this position; None: not requested.
        stream: text of the beam, to find stop strings; None: there are none.
        matched: the end token or stop string that ends the beam; None: it goes on, or the length ends it.
    """

    token: int = -1
    before: BeamNode | None = None
    logprob: Logprob | None = None
    stream: TextStream | None = None
    matched: int | str | None = None

    def path(self) -> Iterator[BeamNode]:
        """Yield the nodes of all tokens, the last first."""
        node = self
        while node.before is not None:
            yield node
            node = node.before


class BeamSearch:
    """State of one beam search: the running beams and the finished answers.

    Args:
        sampling: options of the request.
        stops: tokens that end a beam.
        stream: text of the answer before its first token; None: no stop strings.

    Attributes:
        count: number of new tokens of the running beams.
        parents: for each running beam after `step`, the row of logits that it continues.
        tokens: their last tokens.
    """

    def __init__(self, sampling: SamplingParams, stops: frozenset[int], stream: TextStream | None) -> None:
        self.sampling, self._stops = sampling, sorted(stops)
        self._width = sampling.beams
        self.count = 0
        self._nodes = [BeamNode(stream=stream)] * self._width
        # At first all beams are the same, and only the first one is continued.
        self._scores = torch.tensor([0.0] + [BARRED] * (self._width - 1))
        self._best: list[BeamNode] = list(self._nodes)
        self._best_scores = torch.full((self._width,), BARRED)
        self._finished = torch.zeros(self._width, dtype=torch.bool)
        self._improvable = True
        self.parents: list[int] = []
        self.tokens: list[int] = []

    def step(self, logits: torch.Tensor) -> bool:
        """Continue the beams by one token; return False when the search ends.

        Args:
            logits: [beams, vocabulary], fp32.
        """
        chances = logits.log_softmax(-1)
        scores = chances
        if self.count < self.sampling.min_new_tokens and self._stops:
            scores = chances.clone()
            scores[:, [token for token in self._stops if token < scores.shape[1]]] = -torch.inf
        # Enough candidates, so that `width` of them go on if all end tokens are among the best.
        candidates = max(2, 1 + len(self._stops)) * self._width
        values, places = (scores + self._scores[:, None]).flatten()[None].topk(candidates)
        values, places = values[0], places[0]
        rows, tokens = places // logits.shape[1], (places % logits.shape[1]).tolist()
        nodes = [self._node(row, token, chances) for row, token in zip(rows.tolist(), tokens, strict=True)]
        last = self.count + 1 >= self.sampling.max_new_tokens
        ends = torch.tensor([last or node.matched is not None for node in nodes])
        self._finish(nodes, values, ends)
        running = values + ends * BARRED
        chosen = running[None].topk(self._width).indices[0]
        self._scores, self._nodes = running[chosen], [nodes[i] for i in chosen.tolist()]
        self.parents, self.tokens = rows[chosen].tolist(), [tokens[i] for i in chosen.tolist()]
        self.count += 1
        self._improvable = self._improvable and self._may_improve()
        full = self.sampling.early_stopping is True and bool(self._finished.all())
        return self._improvable and not full and not bool(ends.all())

    def results(self) -> tuple[Beam, ...]:
        """Return the answers, the best first."""
        return tuple(map(self._result, self._best, self._best_scores.tolist()))

    def _node(self, row: int, token: int, chances: torch.Tensor) -> BeamNode:
        before, stream, logprob = self._nodes[row], None, None
        matched: int | str | None = token if token in self._stops else None
        if before.stream is not None:
            stream = before.stream.fork()
            stream.push([token])
            matched = stream.matched if matched is None else matched
        if self.sampling.logprobs is not None:
            values, tokens = chances[row].topk(min(self.sampling.logprobs, chances.shape[1]))
            pairs = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            logprob = Logprob(token, float(chances[row, token]), pairs)
        return BeamNode(token, before, logprob, stream, matched)

    def _finish(self, nodes: list[BeamNode], values: torch.Tensor, ends: torch.Tensor) -> None:
        """Keep the best answers of those so far and the candidates that end, among the first `beams` candidates."""
        ended = ends & (torch.arange(len(nodes)) < self._width)
        values = values / (self.count + 1) ** self.sampling.length_penalty
        if self.sampling.early_stopping is True and bool(self._finished.all()):
            values = values + BARRED
        if not self._improvable:
            values = values + BARRED
        values = values + ~ended * BARRED
        merged = torch.cat([self._best_scores, values])
        chosen = merged[None].topk(self._width).indices[0]
        nodes = self._best + nodes
        self._best, self._best_scores = [nodes[i] for i in chosen.tolist()], merged[chosen]
        self._finished = torch.cat([self._finished, ended])[chosen]

    def _may_improve(self) -> bool:
        """Whether the best running beam may still be better than the worst answer."""
        if not bool(self._finished.all()):
            return True
        options = self.sampling
        longest = options.early_stopping == "never" and options.length_penalty > 0
        length = options.max_new_tokens if longest else self.count
        return bool(self._scores[0] / length**options.length_penalty > self._best_scores.min())

    def _result(self, last: BeamNode, score: float) -> Beam:
        nodes = list(last.path())[::-1]
        logprobs = [node.logprob for node in nodes if node.logprob is not None]
        return Beam(
            [node.token for node in nodes],
            score,
            logprobs if self.sampling.logprobs is not None else None,
            "length" if last.matched is None else "stop",
            last.matched,
        )


class BeamGroup(SequenceGroup):
    """Group of the sequences of a beam search. A member that has its logits waits for the others.

    Args:
        search: state of the search.
        lead: sequence of the prompt, the first member.
    """

    def __init__(self, search: BeamSearch, lead: TokenSequence) -> None:
        super().__init__(len(lead.tokens))
        self.search, self.lead = search, lead
        self._order = [lead]  # sequence of each beam; at first, one for all
        self._rows: dict[TokenSequence, torch.Tensor] = {}

    def take(self, rows: BatchSlice, logits: torch.Tensor, scheduler: Scheduler) -> bool:
        """Record a member's rows of a pass and, if it was the last one, continue the beams; return False at the end.

        Args:
            rows: slice of the member in the pass.
            logits: [rows with logits, vocabulary].
            scheduler: scheduler of the members.
        """
        member = rows.sequence
        if rows.pages is not member.pages:  # since this pass was planned, it continues another beam
            return True
        scheduler.advance(rows, ())
        if rows.wanted and rows.end == len(member.tokens):
            self._rows[member] = logits[-1].detach().float().cpu().clone()
        if len(self._rows) < len(self._order):
            return True
        stacked = torch.stack([self._rows[member] for member in self._order])
        self._rows.clear()
        if not self.search.step(stacked.expand(self.search.sampling.beams, -1)):
            return False
        self._fork(scheduler)
        return True

    def _fork(self, scheduler: Scheduler) -> None:
        """Assign a sequence to each beam: the first continuation of a sequence keeps it, others take a free one."""
        last = len(self._order) - 1
        sources = [self._order[min(parent, last)] for parent in self.search.parents]
        free = [member for member in self._order if member not in sources]
        order: list[TokenSequence] = []
        for source in sources:
            member = source
            if source in order:
                member = free.pop() if free else self._new()
                member.tokens[:] = source.tokens
                scheduler.fork(source, member, source.computed)
            order.append(member)
        for member, token in zip(order, self.search.tokens, strict=True):
            member.tokens.append(token)
        self._order = order

    def _new(self) -> TokenSequence:
        """Return a further member, with the attributes of the lead and without tokens and pages."""
        own = {"tokens": [], "pages": [], "computed": 0, "prefix": None, "registered": 0}
        lead = {each.name: getattr(self.lead, each.name) for each in fields(TokenSequence)}
        return TokenSequence(**{**lead, **own})
