"""Sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from deepspeed.errors import RequestError
from deepspeed.inference.structured_output import StructuredOutput

LOGPROBS_MODES = ("raw", "processed")
_MOST = 3e38  # a bias must be finite in fp32
BEAM_OPTIONS = {
    "max_new_tokens", "min_new_tokens", "logprobs", "stop", "stop_token_ids", "ignore_eos", "seed", "index", "beams",
    "length_penalty", "early_stopping",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping options of a request.

    Applied to fp32 logits in this order: repetition penalty (tokens of prompt and output), presence and frequency
    penalty (tokens of the output), bias, end tokens masked before `min_new_tokens`, temperature, top-k, top-p, min-p.
    Each request has its own random generator: with `seed`, its tokens do not depend on the other requests in the batch.

    Args:
        max_new_tokens: maximum number of new tokens; 0 only with `prompt_logprobs`: the prompt is scored, no more.
        min_new_tokens: minimum number of new tokens before an end token or the end of a stop string.
        temperature: divisor of the logits; 0 is greedy.
        top_k: sample from the k most probable tokens; 0 is off.
        top_p: sample from the smallest set of most probable tokens with a total of p; 1 is off.
        min_p: sample from tokens with at least min_p times the largest probability; 0 is off.
        repetition_penalty: positive logits of tokens in prompt and output are divided by it, negative ones multiplied;
            1 is off.
        presence_penalty: subtracted from the logits of tokens already generated; 0 is off.
        frequency_penalty: subtracted once per occurrence of a token in the output; 0 is off.
        logit_bias: {token: number added to its logit}; infinities are allowed.
        seed: seed of this request's random generator; None: a random seed.
        index: number of this request among several with the same prompt and seed; each gets other random numbers.
        logprobs: number n of most probable tokens whose log-probabilities are returned, besides that of each chosen
            token. None is off.
        logprobs_mode: "raw": log-probabilities are those of the model's own logits, before penalties and temperature;
            "processed": after temperature and truncation, which is the distribution that tokens are drawn from
            (penalties and biases are left out; with temperature 0 those of temperature 1).
        prompt_logprobs: the same for the tokens of the prompt after the first, whose log-probabilities are those of the
            model after the tokens before them. None is off.
        stop: one or more strings that end the text, even across token boundaries; needs the generator's tokenizer.
        stop_token_ids: end tokens in addition to the model's own.
        ignore_eos: do not stop at the model's own end tokens.
        beams: number of beams of a beam search; 1: none. With beams, options that change or draw from the logits are
            refused; the others are `BEAM_OPTIONS`.
        length_penalty: beams are ordered by the sum of their log-probabilities divided by their number of new tokens
            to the power of `length_penalty`; above 0 favours long ones.
        early_stopping: when a beam search ends: True: as soon as `beams` answers are finished; False: when no better
            one is likely; "never": when no better one is possible.
        structured: constraint on the text of the answer, which ends where the constraint has to; end tokens are masked
            where it may not. Needs the generator's tokenizer. None: any text.

    Raises:
        RequestError: an option is out of range, or not available with beams; the message names it.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    index: int = 0
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        self._check_whole("max_new_tokens", 1 if self.prompt_logprobs is None else 0)
        for name in ("min_new_tokens", "top_k", "index"):
            self._check_whole(name, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_whole(name, 0)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise RequestError(f"logprobs_mode is one of {', '.join(LOGPROBS_MODES)}, not {self.logprobs_mode!r}")
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(f"structured has to be a StructuredOutput, not {self.structured!r:.80}")
        if self.seed is not None:
            self._check_whole("seed", -(2**63))
        self._check_range("temperature", 0.0, math.inf)
        self._check_range("top_p", 0.0, 1.0, above=True)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, math.inf, above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_range(name, -math.inf, math.inf)
        self._check_tokens()
        self._check_beams()

    def _check_beams(self) -> None:
        self._check_whole("beams", 1)
        self._check_range("length_penalty", -math.inf, math.inf)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(f'early_stopping has to be true, false or "never", not {self.early_stopping!r}')
        changed = [name for name, default in sampling_defaults().items() if getattr(self, name) != default]
        if self.beams == 1:
            for name in ("length_penalty", "early_stopping"):
                if name in changed:
                    raise RequestError(f"{name} needs beams, at least 2")
        elif others := [name for name in changed if name not in BEAM_OPTIONS]:
            raise RequestError(f"{others[0]} is not available with beams, which follow the model's own probabilities")

    def _check_tokens(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}"
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop has to be strings that are not empty, not {self.stop!r}")
        for name in ("stop_token_ids", "logit_bias"):
            if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in getattr(self, name)):
                raise RequestError(f"{name} names tokens by their number, not {getattr(self, name)!r}")
        biases = self.logit_bias.values()
        if any(not isinstance(b, (int, float)) or not (abs(b) <= _MOST or b in (math.inf, -math.inf)) for b in biases):
            raise RequestError(f"logit_bias adds numbers, not {dict(self.logit_bias)!r}")

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RequestError(f"{name} has to be a whole number of at least {least}, not {value!r}")

    def _check_range(self, name: str, least: float, most: float, above: bool = False) -> None:
        value = getattr(self, name)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
        if not fits or (above and value == least) or (math.isinf(value)):
            bound = "over" if above else "from"
            raise RequestError(f"{name} has to be a number {bound} {least} to {most}, not {value!r}")


def sampling_defaults() -> dict[str, Any]:
    """Return the defaults of `SamplingParams`, by option."""
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(SamplingParams)
    }


Sampling = SamplingParams  # former name, still importable
