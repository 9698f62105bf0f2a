"""The messages between the web process and the engine's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Submit:
    """A request: its number, the prompt's tokens, and the keyword arguments of `SamplingParams`."""

    ident: int
    tokens: list[int]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for this request any more."""

    ident: int


@dataclass(frozen=True)
class Stop:
    """End, once everything sent before is done."""


@dataclass(frozen=True)
class Ready:
    """The engine is loaded: the longest text, and how it generates."""

    max_length: int | None
    kind: str
    why: str


@dataclass(frozen=True)
class Failed:
    """The engine ends, and why."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """A request that the generator does not take, and why."""

    ident: int
    reason: str


@dataclass(frozen=True)
class TokenChunk:
    """New tokens of a request: see `deepspeed.inference.request.Output`.

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
    """One step is over, or the engine has nothing to do.

    Attributes:
        number: of steps so far.
        parts: what it brought.
        running, waiting, free_pages, pages, preemptions: the generator's load.
        idle: there was nothing to do.
    """

    number: int
    parts: list[TokenChunk] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    pages: int = 0
    preemptions: int = 0
    idle: bool = False
