"""Requests and outputs of generation, and the length limits in a model's config."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.errors import LengthError, RequestError
from deepspeed.foundation.transformers_model import LENGTH_KEYS, text_config
from deepspeed.inference.sampling_params import SamplingParams

POOLINGS = ("mean", "last", "cls")  # embeddings of a text from the last hidden states of its tokens
DEFAULT_NEW = 20  # new tokens of Transformers' `generate` without a length
CHANGING = ("dynamic", "longrope")  # rotary types that depend on the sequence length
# Rotary types whose factor makes the original length longer, and those with which the config states the longer length.
LONGER, LONG = ("linear", "dynamic", "yarn"), ("llama3", "longrope")


def _stated_length(config: Any) -> int | None:
    lengths = (getattr(config, name, None) for name in LENGTH_KEYS)
    return next((length for length in lengths if isinstance(length, int) and length > 1), None)


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters of a config: one entry, or one per kind of layer."""
    ropes = getattr(config, "rope_parameters", None)
    if not isinstance(ropes, dict):
        return []
    parts = [part for part in ropes.values() if isinstance(part, dict)]
    return parts or [ropes]


def _reach(rotation: dict[str, Any], stated: int) -> int:
    """Return the positions that a rotation covers, for the length that the config states."""
    factor, original = rotation.get("factor"), rotation.get("original_max_position_embeddings") or stated
    if not isinstance(factor, (int, float)) or not factor > 1 or rotation.get("rope_type") not in (*LONGER, *LONG):
        return stated
    longer = max(stated, int(original * factor))
    return longer if rotation["rope_type"] in LONGER or original >= stated else stated


def length_limit(model: nn.Module) -> int | None:
    """Return the limit of the model on prompt and new tokens together; None if it has no limit.

    It is the length in the config, times the factor of its rotary scaling if that length is the one before scaling. If
    kinds of layers rotate in different ways, the shortest counts.
    """
    config = text_config(model, decoder=True)
    stated = _stated_length(config)
    if stated is None:
        return None
    return min([_reach(rotation, stated) for rotation in _rotations(config)], default=stated)


def packed_limit(model: nn.Module) -> int | None:
    """Return the maximum length of sequences that can share a pass; None if it is unlimited.

    Beyond this length, rotary embeddings of the types "dynamic" and "longrope" change at all positions of the pass.
    """
    config = text_config(model, decoder=True)
    changing = [rotation for rotation in _rotations(config) if rotation.get("rope_type") in CHANGING]
    stated = _stated_length(config) or 0
    return min([part.get("original_max_position_embeddings") or stated for part in changing], default=None)


def end_tokens(model: Any) -> frozenset[int]:
    """Return the end tokens of the model's generation config or, if it has none, of its config."""
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(source, "eos_token_id", None)
        if ends is not None:
            return frozenset(ends) if isinstance(ends, (list, tuple)) else frozenset([ends])
    return frozenset()


def prompt_length(args: tuple[Any, ...], kwargs: dict[str, Any], encoder_decoder: bool) -> int:
    """Return the number of prompt positions of a `generate` call with the arguments `args` and `kwargs`.

    For an `encoder_decoder` model: the length of `decoder_input_ids`, or 1. For other models without a prompt: 0.
    """
    names = ("decoder_input_ids",) if encoder_decoder else ("input_ids", "inputs", "inputs_embeds")
    prompts = [kwargs.get(name) for name in names]
    if args and not encoder_decoder:
        prompts.append(args[0])
    shapes = [prompt.shape for prompt in prompts if isinstance(prompt, torch.Tensor) and prompt.dim() >= 2]
    return max((shape[1] for shape in shapes), default=1 if encoder_decoder else 0)


def new_tokens(prompt: int, kwargs: dict[str, Any], own: Any, model_limit: int | None = None) -> int:
    """Return the maximum number of new tokens of a `generate` call; without any setting as many as Transformers.

    Args:
        prompt: number of prompt positions, for `max_length`.
        kwargs: arguments of the call, with priority over its `generation_config`, which has priority over `own`.
        own: the model's generation_config.
        model_limit: maximum length of the model, which shortens the default; None: unknown.
    """
    settings = [kwargs]
    for config in (kwargs.get("generation_config"), own):
        lengths = {key: getattr(config, key, None) for key in ("max_new_tokens", "max_length")}
        if config is not None and lengths["max_length"] == getattr(type(config)(), "max_length", None):
            lengths["max_length"] = None  # the class default
        settings.append(lengths)
    for lengths in settings:
        if lengths.get("max_new_tokens") is not None:
            return int(lengths["max_new_tokens"])
        if lengths.get("max_length") is not None:
            return max(int(lengths["max_length"]) - prompt, 1 if lengths is settings[-1] else 0)
    return DEFAULT_NEW if model_limit is None else max(min(DEFAULT_NEW, model_limit - prompt), 1)


def check_length(prompt: int, new: int, limit: int | None, model_limit: int | None) -> None:
    """Raise LengthError if `prompt` + `new` tokens exceed `limit` (`max_out_tokens`) or `model_limit` (None: none)."""
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


@dataclass(frozen=True)
class Request:
    """Prompt with sampling options.

    Args:
        ident: id chosen by the caller, unique among unfinished requests.
        tokens: token ids of the prompt, at least one.
        sampling: sampling and stopping options; default: greedy, at most 128 tokens.
        group: id of several requests with the same prompt, which is computed once while one of them is unfinished;
            their pages of the prompt are shared, also without a prefix cache. None: no group.
        adapter: name of the generator's adapter that the request uses; None: the model alone.
        priority: requests with lower numbers come first; equal ones in the order of `submit`.
        pooling: None, or the request is for an embedding of the prompt in place of tokens: the mean of the last hidden
            states ("mean"), that of the last token ("last") or of the first ("cls"); `sampling` has no effect.

    Raises:
        RequestError: the priority is no whole number, or the pooling is unknown.
    """

    ident: Hashable
    tokens: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    _: KW_ONLY
    group: Hashable | None = None
    adapter: str | None = None
    priority: int = 0
    pooling: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RequestError(f"priority has to be a whole number, not {self.priority!r}")
        if self.pooling not in (None, *POOLINGS):
            raise RequestError(f"pooling is one of {', '.join(POOLINGS)}, not {self.pooling!r}")


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities at one position of the output or of the prompt.

    Args:
        token: chosen token.
        logprob: its log-probability (natural logarithm).
        top: (token, log-probability) of the most probable tokens, largest first.
        rank: number of tokens that are at least as probable, itself included; 0 at positions of the output.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class Beam:
    """Answer of a beam search.

    Args:
        tokens: all new tokens, including the end token or the tokens of the stop string.
        score: sum of the tokens' log-probabilities divided by their number to the power of `length_penalty`.
        logprobs: one for each of `tokens`; None if not requested.
        finish_reason: "stop" or "length".
        matched: the end token or stop string that ended it; else None.
    """

    tokens: list[int]
    score: float
    logprobs: list[Logprob] | None
    finish_reason: str
    matched: int | str | None = None


@dataclass(frozen=True)
class Output:
    """Output of one step for one request.

    Args:
        ident: id of the request.
        tokens: tokens since the last output, including the end token or the tokens of the stop string.
        logprobs: one for each of `tokens`; None if not requested.
        finish_reason: None while unfinished; "stop" (end token or stop string), "length", "cancelled", "error".
        matched: the end token or stop string that ended the request; else None.
        error: message of an error; other requests continue.
        beams: answers of a beam search, the best first; the other fields have the best one. None: no beam search, or
            it did not finish.
        prompt_logprobs: one for each token of the prompt, None for the first; in the first output only. None if not
            requested, and in later outputs.
        cached_tokens: number of tokens of the prompt that came from the prefix cache.
        embedding: pooled hidden states, [hidden size]; None: the request is for tokens.
    """

    ident: Hashable
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: str | None = None
    matched: int | str | None = None
    error: str | None = None
    beams: tuple[Beam, ...] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    cached_tokens: int = 0
    embedding: list[float] | None = None


@dataclass(frozen=True)
class EngineStats:
    """Load of a generator: numbers of requests, of pages of the KV cache, and of preemptions and drafts so far.

    Args:
        running: requests in the batch; each beam counts.
        waiting: requests in the queue; each beam counts.
        free_pages: pages that can be allocated now (free ones, and evictable ones of the prefix cache).
        pages: all pages.
        preemptions: running requests that returned to the queue because the cache was full, or for others by priority.
        looked_up: tokens of admitted prompts, which were looked up in the prefix cache.
        reused: tokens among them that were found there.
        drafts: draft tokens so far (speculative decoding).
        accepted: those of them that were the request's own tokens.
        graphs: CUDA graphs of captured passes.
        graph_bytes: device memory that they hold, with their inputs and outputs.
        replays: passes so far that were replays of graphs.
    """

    running: int
    waiting: int
    free_pages: int
    pages: int
    preemptions: int = 0
    looked_up: int = 0
    reused: int = 0
    drafts: int = 0
    accepted: int = 0
    graphs: int = 0
    graph_bytes: int = 0
    replays: int = 0
