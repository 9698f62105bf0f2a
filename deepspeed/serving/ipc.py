"""Messages between the web process and the engine process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Submit:
    """Submit a request: its number, the prompt's tokens, and the keyword arguments of `SamplingParams`."""

    ident: int
    tokens: list[int]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Cancel:
    """Cancel a request."""

    ident: int


@dataclass(frozen=True)
class Stop:
    """End the engine after all earlier messages."""


@dataclass(frozen=True)
class Ready:
    """Report a loaded engine: its maximum length, and its kind of generation."""

    max_length: int | None
    kind: str
    why: str


@dataclass(frozen=True)
class Failed:
    """Report the end of the engine, with the reason."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Report a refused request, with the reason."""

    ident: int
    reason: str


@dataclass(frozen=True)
class TokenChunk:
    """New tokens of a request; see `deepspeed.inference.request.Output`.

    `logprobs` are (token, log-probability, ((token, log-probability), …)).
    """

    ident: int
    tokens: list[int]
    logprobs: list[tuple[int, float, tuple[tuple[int, float], ...]]] | None
    finish_reason: str | None
    matched: int | str | None
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """Report a finished step, or that the engine has no work.

    Attributes:
        number: number of steps so far.
        parts: outputs of the step.
        running, waiting, free_pages, pages, preemptions: load of the generator.
        idle: whether there was no work.
    """

    number: int
    parts: list[TokenChunk] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    preemptions: int = 0
    idle: bool = False
