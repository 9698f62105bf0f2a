"""State of a request between `submit` and its last output."""

from __future__ import annotations

import weakref

import torch

from deepspeed.inference.beam_search import BeamGroup
from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.draft_model import Proposer
from deepspeed.inference.executors.hf_generate import Thread
from deepspeed.inference.prompt_rows import PooledStates, PromptScore, own_rows
from deepspeed.inference.request import Logprob, Output, Request
from deepspeed.inference.sampler import Sampler
from deepspeed.inference.scheduler import TokenSequence
from deepspeed.inference.structured_output import Matcher

_NO_NUMBERS = (
    "after {} new tokens the model's logits are not finite, so no token can be chosen: its weights hold NaN, or this "
    "text overflows its dtype; try bf16 or fp32"
)


class LiveSequence(TokenSequence):
    """State of an unfinished request: tokens, sampler, text stream, new output; `ends`: the model's end tokens."""

    def __init__(
        self,
        request: Request,
        tokens: list[int],
        arrival: int,
        ends: frozenset[int],
        stream: TextStream | None,
        matcher: Matcher | None,
    ) -> None:
        super().__init__(request.ident, tokens, arrival)
        self.sampling, self.stream = request.sampling, stream
        self.sampler = Sampler(request.sampling, self.tokens, ends, matcher)
        self.proposer: Proposer | None = None
        self.beams: BeamGroup | None = None
        self.thread: Thread | None = None
        self.priority, self.hidden = request.priority, request.pooling is not None
        wanted = None if self.hidden else request.sampling.prompt_logprobs
        self.own_rows = own_rows(tokens, wanted is not None, request.pooling)
        drawn_from = self.sampling if self.sampling.logprobs_mode == "processed" else None
        self.score = None if wanted is None else PromptScore(tokens, wanted, drawn_from)
        self.pooled = None if request.pooling is None else PooledStates(request.pooling)
        self.embedding: list[float] | None = None
        self.new: list[int] = []
        self.logprobs: list[Logprob] = []
        self.reason: str | None = None
        self.matched: int | str | None = None
        self.failure: Exception | None = None

    def take(self, logits: torch.Tensor | None, token: int | None = None) -> int:
        """Record and return `token`, or one sampled from `logits` [vocabulary]; set `reason` if the request ends."""
        if token is None:
            token, logprob = self.sampler.next(logits)  # type: ignore[arg-type]
            if logprob is not None:
                self.logprobs.append(logprob)
        else:
            self.sampler.note(token)
        self.new.append(token)
        if self.stream is not None:
            self.stream.push([token])
        if token in self.sampler.stops and self.sampler.count > self.sampling.min_new_tokens:
            self.reason, self.matched = "stop", token
        elif self.stream is not None and self.stream.matched is not None:
            self.reason, self.matched = "stop", self.stream.matched
        elif self.sampler.complete:
            self.reason = "stop"
        elif self.sampler.count >= self.sampling.max_new_tokens:
            self.reason = "length"
        return token

    @staticmethod
    def take_in_thread(reference: weakref.ref[LiveSequence], row: torch.Tensor) -> int | None:
        """Call `take` in the thread of `generate`; return the token, or None if the request ends.

        Args:
            reference: the sequence, by a weak reference: a strong one would keep request and thread alive.
            row: logits [vocabulary].
        """
        sequence = reference()
        if sequence is None:
            return None
        if not row.amax().isfinite():
            sequence.reason = "error"
            return None
        token = sequence.take(row)
        return None if sequence.reason is not None else token

    def fail(self, error: Exception) -> None:
        """End this request with an error; other requests continue."""
        self.reason, self.failure = "error", error

    def read(self, logits: torch.Tensor, chosen: list[int]) -> None:
        """Take logits [rows, vocabulary] of rows of the prompt, and their argmax (negative: not finite)."""
        if min(chosen) < 0:
            self.reason = "error"
            return
        try:
            self.score.add(logits)  # type: ignore[union-attr]
        except Exception as error:  # such as a token of the prompt that the head lacks
            self.fail(error)

    def pool(self) -> None:
        """End a request for an embedding."""
        self.embedding = self.pooled.embedding()  # type: ignore[union-attr]
        self.reason = "error" if self.embedding is None else "stop"

    def output(self) -> Output:
        """Return the tokens since the last output, as an `Output`."""
        logprobs = self.logprobs if self.sampling.logprobs is not None and not self.hidden else None
        error = None
        if self.failure is not None:
            error = f"{type(self.failure).__name__}: {self.failure}"
        elif self.reason == "error":
            error = _NO_NUMBERS.format(self.sampler.count)
        new, self.new, self.logprobs = self.new, [], []
        answers = None
        if self.beams is not None and self.reason in ("stop", "length"):
            answers = self.beams.search.results()
        scored = self.score.entries if self.score is not None and self.score.complete else None
        self.score = None if scored is not None else self.score
        return Output(
            self.ident, new, logprobs, self.reason, self.matched, error, answers, scored, self.cached or 0,
            self.embedding,
        )  # fmt: skip

    def outputs(self, accepted: list[int]) -> list[Output]:
        """Return the output since the last one in a list, which is empty without new tokens and before the end."""
        return [self.output()] if accepted or self.reason is not None else []

    def take_beams(self) -> None:
        """Record the best answer of a finished beam search, and set `reason`."""
        best = self.beams.search.results()[0]  # type: ignore[union-attr]
        self.new, self.logprobs = list(best.tokens), list(best.logprobs or ())
        self.reason, self.matched = best.finish_reason, best.matched
