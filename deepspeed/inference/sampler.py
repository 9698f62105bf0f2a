"""Sampler of tokens from fp32 logits, with each request's options and random generator."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from deepspeed.inference.logprobs import COLDEST, kept_probs, log_probs, truncates
from deepspeed.inference.request import Logprob
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.inference.structured_output import Matcher
from deepspeed.ops.triton.sampling import option_row, uniform

LARGEST_PENALTY = 1e30  # beyond it and its inverse, scores in fp32 on a device could become infinite


class Sampler:
    """Sampler for one request, called once per token.

    Args:
        sampling: options of the request.
        prompt: tokens of the prompt, for the repetition penalty.
        ends: the model's own end tokens.
        matcher: state of the constraint on the text; None: any text.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        ends: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
    ) -> None:
        self.sampling, self._matcher = sampling, matcher
        self.ends = frozenset() if sampling.ignore_eos else ends
        self.stops = self.ends | set(sampling.stop_token_ids)
        self.count = 0
        self.drawn: list[tuple[int, Logprob | None]] = []  # next tokens that are drawn already
        self.counted = False  # whether random numbers are those of `ops.triton.sampling`, which a device draws too
        self.option_row = option_row(sampling)
        self._counts: Counter[int] = Counter()
        self._seen = self._indices(set(prompt)) if sampling.repetition_penalty != 1 else None
        biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._bias = self._indices(sampling.logit_bias), biases
        self._generator: torch.Generator | None = None
        self.seed = 0
        if sampling.temperature:
            self._generator = torch.Generator()
            # A separate generator: the process's random state belongs to the user, who may train with it.
            seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
            self.seed = (seed + 0x9E3779B97F4A7C15 * sampling.index) % 2**63
            self._generator.manual_seed(self.seed)

    @property
    def plain(self) -> bool:
        """Whether the argmax of the logits is the next token, and no log-probabilities are requested."""
        return self._matcher is None and self._greedy and self.sampling.logprobs is None

    @property
    def complete(self) -> bool:
        """Whether nothing can follow the text under its constraint."""
        return self._matcher is not None and self._matcher.complete

    @property
    def _greedy(self) -> bool:
        """Whether the argmax of the logits is the next token, if a constraint allows it."""
        options = self.sampling
        return (
            not options.temperature
            and options.repetition_penalty == 1
            and not options.presence_penalty
            and not options.frequency_penalty
            and not options.logit_bias
            and self.count >= options.min_new_tokens
        )

    def next(self, logits: torch.Tensor) -> tuple[int, Logprob | None]:
        """Return the next token for logits [vocabulary], and its log-probabilities or None (not requested)."""
        if self.drawn:
            token, logprob = self.drawn.pop(0)
            self.note(token)
            return token, logprob
        logits = logits.detach().float().cpu()
        token = self._likely(logits)
        if token is None:
            scores = self._adjusted(logits)
            if self._matcher is not None:
                self._matcher.mask(scores, self.stops)
            token = int(scores.argmax()) if self._generator is None else self._drawn(scores)
        logprob = None
        if self.sampling.logprobs is not None:
            raw = self.sampling.logprobs_mode == "raw"
            chances = logits.log_softmax(-1) if raw else log_probs(logits[None], self.sampling)[0]
            values, tokens = chances.topk(min(self.sampling.logprobs, len(chances)))
            pairs = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            logprob = Logprob(token, float(chances[token]), pairs)
        self.note(token)
        return token, logprob

    def note(self, token: int) -> None:
        """Record a chosen token, for the penalties and `min_new_tokens`."""
        self.count += 1
        if self._matcher is not None and token not in self.stops:
            self._matcher.accept(token)
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._counts[token] += 1
        if self._seen is not None and not bool((self._seen == token).any()):
            self._seen = torch.cat([self._seen, self._seen.new_tensor([token])])

    def valid(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return those of the first drafts that the constraint allows; the first one that it does not is the end."""
        return drafts if self._matcher is None else drafts[: self._matcher.valid(drafts, self.stops)]

    def _likely(self, logits: torch.Tensor) -> int | None:
        """Return the most probable token, if it is the next one under the constraint: this needs no mask. Else None."""
        if self._matcher is None or not self._greedy:
            return None
        token = int(logits.argmax())
        allowed = self._matcher.accepting if token in self.stops else self._matcher.valid([token]) == 1
        return token if allowed else None

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        options, scores = self.sampling, logits.clone()
        if self._seen is not None:
            seen = self._seen[self._seen < len(scores)]
            was = scores[seen]
            scores[seen] = torch.where(was > 0, was / options.repetition_penalty, was * options.repetition_penalty)
        if self._counts:
            counted = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            scores[counted] -= options.presence_penalty + options.frequency_penalty * counts
        biased, bias = self._bias
        scores[biased[biased < len(scores)]] += bias[biased < len(scores)]
        if self.count < options.min_new_tokens and self.stops:
            scores[[token for token in self.stops if token < len(scores)]] = -math.inf
        return scores

    def _drawn(self, scores: torch.Tensor) -> int:
        """Draw one token from scores [vocabulary]. Each draw uses one uniform random number, with any options."""
        number = self.random()
        if scores.max() == torch.inf:  # by a bias
            return int(scores.argmax())
        return int(draw(scores[None], self.sampling, number[None])[0])

    def random(self) -> torch.Tensor:
        """Return the next random number of the request, fp64, from 0 to below 1."""
        if self.counted:
            return torch.tensor(uniform(self.seed, self.count), dtype=torch.float64)
        return torch.rand((), generator=self._generator, dtype=torch.float64)

    @property
    def draws_plainly(self) -> bool:
        """Whether the next token depends on the model's own logits alone, and no alternatives to it are requested."""
        options = self.sampling
        return (
            self._matcher is None
            and not options.logprobs
            and options.repetition_penalty == 1
            and not options.presence_penalty
            and not options.frequency_penalty
            and not options.logit_bias
            and self.count >= options.min_new_tokens
        )

    @property
    def draws_on_device(self) -> bool:
        """Whether the next tokens depend on logits, penalties and random numbers alone, and no alternatives to them are
        requested: then a device can choose them."""
        options = self.sampling
        return (
            self._matcher is None
            and options.logprobs is None
            and not options.logit_bias
            and self.count >= options.min_new_tokens
            and 1 / LARGEST_PENALTY < options.repetition_penalty < LARGEST_PENALTY
        )

    def entries(self, ahead: Sequence[int], vocabulary: int) -> dict[int, int]:
        """Return what penalties count of each token, as `ops.triton.sampling.sample` wants it: 1 if it is in prompt or
        output, plus 2 for each time in the output; only what the request's penalties read.

        Args:
            ahead: tokens that are supposed to follow the output.
            vocabulary: number of tokens; others have no entries.
        """
        if self._seen is None and not (self.sampling.presence_penalty or self.sampling.frequency_penalty):
            return {}
        entries: Counter[int] = Counter()
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            for token, count in (self._counts + Counter(ahead)).items():
                entries[token] += 2 * count
        if self._seen is not None:
            for token in {*self._seen.tolist(), *ahead}:
                entries[token] += 1
        return {token: entry for token, entry in entries.items() if token < vocabulary}

    @staticmethod
    def _indices(tokens: Iterable[int]) -> torch.Tensor:
        """Return tokens as indices; values above int64 are clamped to the largest index."""
        return torch.tensor([min(token, 2**63 - 1) for token in tokens], dtype=torch.long)


def draw(scores: torch.Tensor, sampling: SamplingParams, numbers: torch.Tensor) -> torch.Tensor:
    """Draw one token per row, int64 [rows]; a row's token does not depend on the other rows.

    Args:
        scores: logits, fp32 [rows, vocabulary].
        sampling: temperature (above 0) and truncation.
        numbers: a random number from 0 to below 1 per row, fp64 [rows].
    """
    order = None
    if truncates(sampling):
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        chances = kept_probs(scores, sampling)
    else:  # the order of the vocabulary does as well, and sorting would take longer than all the rest
        if sampling.temperature != 1:  # differences cannot overflow; those of temperature 1 are taken by softmax itself
            scores = (scores - scores.amax(-1, keepdim=True)) / max(sampling.temperature, COLDEST)
        chances = scores.softmax(-1)
    sums = chances.cumsum(-1, dtype=torch.float64)
    places = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True).clamp_(max=sums.shape[1] - 1)
    # A number that is rounded to the end of the sums belongs to the last token that has a chance.
    if not bool(chances.gather(-1, places).all()):
        last = chances.shape[1] - 1 - (chances > 0).int().flip(-1).argmax(-1, keepdim=True)
        places = torch.minimum(places, last)
    return (places if order is None else order.gather(-1, places))[:, 0]


def draw_together(rows: Sequence[tuple[Sampler, int]], logits: torch.Tensor, largest: Sequence[int]) -> None:
    """Draw the next tokens of several requests at once, for the next call of `Sampler.next` of each.

    Args:
        rows: samplers that draw plainly, each with the number of its row.
        logits: logits of a pass, [rows, vocabulary].
        largest: argmax of each row; negative if the row is not finite.
    """
    alike: dict[tuple[Any, ...], list[tuple[Sampler, int]]] = {}
    for sampler, row in rows:
        options = sampler.sampling
        key = (
            options.temperature, options.top_k, options.top_p, options.min_p, options.logprobs, options.logprobs_mode,
        )  # fmt: skip
        alike.setdefault(key, []).append((sampler, row))
    for group in alike.values():
        sampling, indices = group[0][0].sampling, [row for _, row in group]
        scores = logits if indices == list(range(len(logits))) else logits[indices]
        scores = scores.detach().float().cpu()
        if sampling.temperature:
            numbers = torch.cat([sampler.random()[None] for sampler, _ in group])
            tokens = draw(scores, sampling, numbers)
        else:
            tokens = torch.tensor([max(largest[row], 0) for row in indices])
        entries: list[Logprob | None] = [None] * len(group)
        if sampling.logprobs is not None:
            raw = sampling.logprobs_mode == "raw"
            chances = scores.log_softmax(-1) if raw else log_probs(scores, sampling)
            values = chances.gather(-1, tokens[:, None])[:, 0].tolist()
            entries = [Logprob(token, value) for token, value in zip(tokens.tolist(), values, strict=True)]
        for (sampler, _), token, entry in zip(group, tokens.tolist(), entries, strict=True):
            sampler.drawn = [(token, entry)]
