"""Proposers of draft tokens for speculative decoding: n-gram lookup in the text, and a smaller model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from deepspeed.errors import NotAvailableError, RequestError
from deepspeed.foundation.transformers_model import vocabulary_size
from deepspeed.inference.device_sampling import run_pass
from deepspeed.inference.executors.select import exclusive_pass, select_executor, settle_attention
from deepspeed.inference.kv_cache import BlockPool
from deepspeed.inference.request import length_limit, packed_limit
from deepspeed.inference.scheduler import Scheduler, SequenceGroup, TokenSequence

LONGEST, SHORTEST = 3, 2  # lengths of the matched n-grams
TRIAL, PAYS = 12, 0.3  # drafts before the first decision, and the acceptance rate that pays for their verification
MOST_NEEDED = 0.9  # largest acceptance rate that is needed, however expensive the draft model is
ROWS = 64  # of a pass of the draft model
REST = 64  # turns without drafts after a negative decision


class Proposer(ABC):
    """Proposer of draft tokens for one sequence.

    Drafts begin with two tokens, get twice as long when all are accepted, and half as long when few are. The proposer
    pauses for `REST` turns when too few drafts were accepted.

    Args:
        most: maximum number of draft tokens at a time.
        pays: acceptance rate that is needed.
    """

    def __init__(self, most: int, pays: float = PAYS) -> None:
        self.most, self.pays = most, pays
        self._length = min(2, most)
        self._judged = self._held = self._resting = 0

    @abstractmethod
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return draft tokens to follow `tokens`, at most `most`; an empty list without any, and in a pause."""

    def judge(self, guessed: int, held: int) -> None:
        """Record that `held` of the last `guessed` draft tokens were accepted, to decide on a pause."""
        if guessed and held == guessed:
            self._length = min(2 * self._length, self.most)
        elif 2 * held < guessed:
            self._length = max(self._length // 2, 1)
        self._judged, self._held = self._judged + guessed, self._held + held
        if self._judged >= TRIAL:
            if self._held < self.pays * self._judged:
                self._resting = REST
            self._judged = self._held = 0

    def close(self) -> None:  # noqa: B027
        """Free what the proposer keeps for its sequence, which has ended."""

    def _turn(self) -> int:
        """Return the number of draft tokens for the next pass; 0 in a pause, of which one turn is over."""
        if self._resting > 0:
            self._resting -= 1
            return 0
        return self._length


class NgramProposer(Proposer):
    """Proposer by n-gram lookup in the sequence's own tokens (prompt lookup decoding)."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._places: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the tokens after the last occurrence of the last n-gram; an empty list without a match."""
        self._learn(tokens)
        count = self._turn()
        for length in range(LONGEST, SHORTEST - 1, -1) if count else ():
            place = self._places.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if place is not None:
                return list(tokens[place : place + min(count, most)])
        return []

    def _learn(self, tokens: Sequence[int]) -> None:
        """Index the n-grams of `tokens` that have a next token."""
        for end in range(max(self._seen, SHORTEST), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._places[tuple(tokens[end - length : end])] = end
        self._seen = max(self._seen, len(tokens))


class DraftProposer(Proposer):
    """Proposer by a draft model: returns the tokens that `DraftModel.prepare` has generated for the next pass.

    Args:
        model: the draft model with its cache.
        most: maximum number of draft tokens at a time.
        sequence: sequence in the draft model's scheduler, with the tokens of the target's sequence.
    """

    def __init__(self, model: DraftModel, most: int, sequence: TokenSequence) -> None:
        super().__init__(most, model.pays)
        self.sequence = sequence
        self.drafts: list[int] = []
        self._model, self._confirmed = model, 0
        self._added = False

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the prepared draft tokens, at most `most`."""
        drafts, self.drafts = self.drafts[:most], []
        return drafts

    def turn(self, tokens: Sequence[int], most: int) -> int:
        """Prepare the draft sequence for the next pass, and return the number of tokens to generate.

        Args:
            tokens: tokens of the target's sequence, which begin with those of the last call.
            most: maximum number.
        """
        self.drafts = []
        count = min(self._turn(), most)
        if count > 0:
            self._follow(tokens)
        return count

    def close(self) -> None:
        """Free the pages of the draft sequence."""
        if self._added:
            self._model.scheduler.remove(self.sequence)
        self._added = False

    def _follow(self, tokens: Sequence[int]) -> None:
        """Give the draft sequence the target's tokens; keep the keys and values of tokens that are the same."""
        own, same = self.sequence.tokens, min(self._confirmed, len(tokens))
        while same < min(len(own), len(tokens)) and own[same] == tokens[same]:
            same += 1
        own[same:] = tokens[same:]
        self._confirmed = len(tokens)
        if not self._added:
            self._model.scheduler.add(self.sequence)
            self._added = True
        self._model.scheduler.rewind(self.sequence, min(same, len(tokens) - 1))


class DraftModel:
    """Draft model with a paged KV cache of its own, whose greedy tokens are the drafts of several sequences at once.

    A sequence without pages, or whose prompt is not read to the end yet, gets no drafts in a pass. Prompts are read
    `ROWS` tokens at a time, since other sequences wait for the pass.

    Args:
        model: a causal LM whose vocabulary has the size of that of `target`.
        target: the model that verifies the drafts.
        pool: pool of the target's cache; this one has as many pages of the same size.
        max_tokens: maximum number of tokens in a pass; `ROWS` if it is more.
        max_sequences: maximum number of sequences.
        lossless_weights: as in `Generator`.

    Raises:
        RequestError: the vocabularies differ in size.
        NotAvailableError: no executor can batch the model.
    """

    def __init__(
        self, model: nn.Module, target: nn.Module, pool: BlockPool, max_tokens: int, max_sequences: int,
        lossless_weights: bool = False,
    ) -> None:  # fmt: skip
        sizes = [vocabulary_size(each, decoder=True) for each in (model, target)]
        if sizes[0] != sizes[1]:
            raise RequestError(
                f"the draft model has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}; they have to "
                "be the same"
            )
        self.model = model
        self._executor, why = select_executor(model, packed=lossless_weights)
        if self._executor is None:
            raise NotAvailableError(f"{type(model).__name__} cannot be a draft model: it cannot be batched: {why}")
        limits = [limit for limit in (length_limit(model), packed_limit(model)) if limit is not None]
        self._limit = min(limits, default=None)
        self.pays = min(PAYS + _bytes_of(model) / max(_bytes_of(target), 1), MOST_NEEDED)
        self._executor.store = self._executor.store.resized(pool.count, pool.size)
        self._executor = settle_attention(self._executor, pool.size)
        self.pages = BlockPool(pool.count, pool.size, pool.reuse)
        self.scheduler = Scheduler(self.pages, self._copy, min(max_tokens, ROWS), max_sequences)

    def proposer(self, sequence: TokenSequence, most: int, group: SequenceGroup | None) -> DraftProposer:
        """Return the proposer of a target's sequence, with at most `most` draft tokens at a time.

        `group`: group of the draft sequence, for sequences with a common prompt.
        """
        return DraftProposer(self, most, TokenSequence(sequence.ident, [], sequence.arrival, group=group))

    def prepare(self, wanted: Sequence[tuple[DraftProposer, Sequence[int], int]]) -> None:
        """Generate the drafts of the next pass, batched, in as many passes as the longest has tokens.

        Args:
            wanted: (proposer, tokens of its target's sequence, maximum number of draft tokens).
        """
        counts: dict[TokenSequence, tuple[DraftProposer, int]] = {}
        for proposer, tokens, most in wanted:
            room = most if self._limit is None else min(most, self._limit - len(tokens))
            if (count := proposer.turn(tokens, room)) > 0:
                counts[proposer.sequence] = proposer, count
        with exclusive_pass(self.model):
            for _ in range(max((count for _, count in counts.values()), default=0)):
                if not self._pass(counts):
                    return

    def close(self) -> None:
        """Free the KV cache."""
        self._executor.store.layers.clear()

    def _pass(self, counts: dict[TokenSequence, tuple[DraftProposer, int]]) -> bool:
        """Run one pass; returns False if there is nothing to compute."""
        slices = self.scheduler.plan()
        if not slices:
            return False
        chosen = iter(run_pass(self._executor, slices, self.pages.size)[2])
        for rows in slices:
            proposer, count = counts.get(rows.sequence, (None, 0))
            more = False  # a sequence whose last token is computed has nothing to do until the next drafts
            if rows.wanted and (token := next(chosen)) >= 0 and proposer is not None and len(proposer.drafts) < count:
                proposer.drafts.append(token)
                more = len(proposer.drafts) < count
            self.scheduler.advance(rows, [token] if more else [])
        return True

    def _copy(self, source: int, target: int) -> None:
        self._executor.store.copy(source, target)


def drafting(sequences: Iterable[Any], most: Callable[[Any], int]) -> list[tuple[DraftProposer, Sequence[int], int]]:
    """Return what `DraftModel.prepare` takes for those of the sequences whose drafts a model proposes.

    Args:
        sequences: decoding sequences.
        most: function that returns the largest number of drafts that a sequence has use for.
    """
    pairs = ((getattr(sequence, "proposer", None), sequence) for sequence in sequences)
    return [(own, each.tokens, most(each)) for own, each in pairs if isinstance(own, DraftProposer)]


def _bytes_of(model: Any) -> int:
    return sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
