"""Requests, sampling options and outputs, with the length limits of a model's config."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.errors import LengthError, RequestError
from deepspeed.foundation.transformers_model import LENGTH_KEYS, text_config

CHANGING = ("dynamic", "longrope")  # rotations that depend on the length of the sequence, which a pass has many of


def length_limit(model: nn.Module) -> int | None:
    """Tokens of prompt and answer that the model's positions bear; None where the config states none."""
    config = text_config(model, decoder=True)
    for name in LENGTH_KEYS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return None


def packed_limit(model: nn.Module) -> int | None:
    """Longer sequences change how the model rotates all positions of a pass, so they cannot share one; None where
    length changes nothing."""
    config = text_config(model, decoder=True)
    ropes = getattr(config, "rope_parameters", None) or {}
    parts = [ropes, *(part for part in ropes.values() if isinstance(part, dict))] if isinstance(ropes, dict) else []
    limits = []
    for part in parts:
        if part.get("rope_type") in CHANGING:
            limits.append(part.get("original_max_position_embeddings") or length_limit(model) or 0)
    return min(limits) if limits else None


def prompt_length(args: tuple[Any, ...], kwargs: dict[str, Any], encoder_decoder: bool) -> int:
    """Positions that a call of `generate` fills before its first new token."""
    names = ("decoder_input_ids",) if encoder_decoder else ("input_ids", "inputs", "inputs_embeds")
    prompts = [kwargs.get(name) for name in names]
    if args and not encoder_decoder:
        prompts.append(args[0])
    shapes = [prompt.shape for prompt in prompts if isinstance(prompt, torch.Tensor) and prompt.dim() >= 2]
    return max((shape[1] for shape in shapes), default=1 if encoder_decoder else 0)


def new_tokens(prompt: int, kwargs: dict[str, Any], own: Any) -> int:
    """Tokens that a call of `generate` may write after such a prompt; `own` is the model's generation_config."""
    settings = [kwargs]
    for config in (kwargs.get("generation_config"), own):
        lengths = {key: getattr(config, key, None) for key in ("max_new_tokens", "max_length")}
        if lengths["max_length"] == 20:  # the default of the class, which nobody has set
            lengths["max_length"] = None
        settings.append(lengths)
    for lengths in settings:
        if lengths.get("max_new_tokens") is not None:
            return int(lengths["max_new_tokens"])
        if lengths.get("max_length") is not None:
            return max(int(lengths["max_length"]) - prompt, 1 if lengths is settings[-1] else 0)
    return 1


def check_length(prompt: int, new: int, limit: int | None, model_limit: int | None) -> None:
    """Refuse a prompt and new tokens that are longer than `max_out_tokens`, the limit, or than the model's own."""
    for most, whose, advice in (
        (limit, "max_out_tokens", "Please increase max_tokens in the DeepSpeed Inference Config."),
        (model_limit, "the model's own limit", "Shorten the prompt, or ask for fewer tokens."),
    ):
        if most is None or prompt + new <= most:
            continue
        if prompt > most:
            raise LengthError(f"Input with size {prompt} exceeds maximum length of {most} ({whose}). {advice}")
        raise LengthError(
            f"Input with size {prompt} and {new} new tokens, {prompt + new} together, exceed maximum length of {most} "
            f"({whose}). {advice}"
        )


_MOST = 3e38  # a bias has to be a number of fp32


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when a request ends.

    Applied to fp32 logits in this order: repetition penalty (tokens of prompt and output), presence and frequency
    penalty (tokens of the output), bias, end tokens barred before `min_new_tokens`, temperature, top-k, top-p, min-p.
    `temperature=0` takes the largest. Draws come from a generator of the request's own: with `seed` they are the same
    whatever else is in the batch; `index` tells the several answers of one seed apart.

    Args:
        max_new_tokens: tokens at most.
        min_new_tokens: no end token before so many.
        temperature: divides the logits; 0 is greedy.
        top_k: only the k most probable; 0 is off.
        top_p: only the most probable whose sum reaches p; 1 is off.
        min_p: only those of at least min_p times the largest probability; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens already seen; 1 is off.
        presence_penalty: taken off the logits of tokens already generated.
        frequency_penalty: the same, times how often.
        logit_bias: added to the logits of single tokens.
        seed: of this request's draws; None draws one.
        index: which of several answers with one seed.
        logprobs: log-probabilities of each token and of the n most probable ones, of the model's own distribution
            (before penalties and temperature); None is off.
        stop: strings that end the text; found across the borders of tokens (needs the generator's tokenizer).
        stop_token_ids: tokens that end it besides the model's own.
        ignore_eos: the model's own end tokens do not end it.

    Raises:
        RequestError: an option outside its range, by name.
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
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        self._check_whole("max_new_tokens", 1)
        for name in ("min_new_tokens", "top_k", "index"):
            self._check_whole(name, 0)
        if self.logprobs is not None:
            self._check_whole("logprobs", 0)
        if self.seed is not None:
            self._check_whole("seed", -(2**63))
        self._check_range("temperature", 0.0, math.inf)
        self._check_range("top_p", 0.0, 1.0, above=True)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, math.inf, above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_range(name, -math.inf, math.inf)
        self._check_tokens()

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


Sampling = SamplingParams  # the former name, still importable


@dataclass(frozen=True)
class Request:
    """A prompt under a name of the caller's choice, unique among the requests that are not finished."""

    ident: Hashable
    tokens: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token that was chosen, and of the most probable ones, largest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step brought one request.

    Args:
        ident: the request's.
        tokens: new since the last output; with the end token or the tokens of the stop string, if one ended it.
        logprobs: one for each of `tokens` if asked for.
        finish_reason: None while it goes on; "stop" (end token or string), "length", "cancelled", "error".
        matched: the end token or stop string that ended it.
        error: what went wrong, in words; the others are not touched by it.
    """

    ident: Hashable
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: str | None = None
    matched: int | str | None = None
    error: str | None = None
