"""Messages between the web process and the engine process."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from deepspeed.inference.shared_tensors import SharedTensor
from deepspeed.serving.generation_defaults import GenerationDefaults


@dataclass(frozen=True)
class Submit:
    """New request: its number, the prompt's token ids, and the keyword arguments of `SamplingParams`.

    The other fields are those of `deepspeed.inference.request.Request`.
    """

    ident: int
    tokens: list[int]
    sampling: dict[str, Any]
    _: KW_ONLY
    group: int | None = None
    adapter: str | None = None
    priority: int = 0
    pooling: str | None = None


@dataclass(frozen=True)
class LoadAdapter:
    """Request with the number `ident` to load the LoRA adapter `name` from a folder; answer: `Accepted`, `Refused`."""

    ident: int
    name: str
    folder: str


@dataclass(frozen=True)
class UnloadAdapter:
    """Request with the number `ident` to remove the LoRA adapter `name`; the answer is `Accepted` or `Refused`."""

    ident: int
    name: str


@dataclass(frozen=True)
class ChangeWeights:
    """Message number `ident` of an update of the weights, as in `UpdateBody`; answer: `Accepted` or `Refused`."""

    ident: int
    action: str
    mode: str
    shared_memory: str
    tensors: tuple[SharedTensor, ...]


@dataclass(frozen=True)
class Cancel:
    """Cancellation of the request with the number `ident`."""

    ident: int


@dataclass(frozen=True)
class Stop:
    """Request to end the engine process after all unfinished requests."""


@dataclass(frozen=True)
class Ready:
    """Report that the model is loaded.

    Attributes:
        max_length: maximum number of tokens of prompt and answer; None: no limit.
        kind: implementation that generates; "generate" is Transformers' own.
        why: reason why no faster implementation works for the model; "" if `kind` is the fastest.
        vocabulary: number of tokens of the model, which may be more than the tokenizer's; None: unknown.
        packed_length: maximum number of tokens of a request in shared passes; None: requests go one by one.
        defaults: end tokens and sampling options that the model's folder states.
    """

    max_length: int | None
    kind: str
    why: str
    vocabulary: int | None = None
    packed_length: int | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


@dataclass(frozen=True)
class Failed:
    """Report that the engine ends after an error, with its text."""

    reason: str


@dataclass(frozen=True)
class Accepted:
    """Report that the request with the number `ident` is in the queue, or a change of adapters or weights is done.

    `version` is the number of updates of the weights so far; those that a request starts with are those of its answer.
    """

    ident: int
    version: int = 0


@dataclass(frozen=True)
class Refused:
    """Report that the request with the number `ident` is not accepted, with the reason and OpenAI's code for it."""

    ident: int
    reason: str
    code: str = "invalid_value"


class ScoredToken(NamedTuple):
    """Log-probability of a token of a prompt; see `deepspeed.inference.request.Logprob`."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


@dataclass(frozen=True)
class TokenChunk:
    """New tokens of a request; see `deepspeed.inference.request.Output`.

    `logprobs`: (token, log-probability, alternatives as (token, log-probability)) for each token; None: not requested.
    `beams`: answers of a beam search, the best first; empty: no beam search, or it did not finish.
    `prompt_logprobs` has an entry for each token of the prompt, in the first chunk only.
    """

    ident: int
    tokens: list[int]
    logprobs: list[tuple[int, float, tuple[tuple[int, float], ...]]] | None
    finish_reason: str | None
    matched: int | str | None
    error: str | None = None
    beams: tuple[TokenChunk, ...] = ()
    prompt_logprobs: list[ScoredToken | None] | None = None
    cached_tokens: int = 0
    embedding: list[float] | None = None


@dataclass(frozen=True)
class Step:
    """Report of a finished step, or that the engine has no work.

    Attributes:
        number: number of steps so far.
        parts: outputs of the step.
        running, waiting: numbers of sequences.
        free_pages, pages: pages of the KV cache.
        preemptions: number of preempted sequences so far.
        idle: whether there was no work.
        looked_up, reused: numbers of tokens looked up and found in the prefix cache so far.
    """

    number: int
    parts: list[TokenChunk] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    preemptions: int = 0
    idle: bool = False
    looked_up: int = 0
    reused: int = 0
