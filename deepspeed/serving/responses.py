"""Responses in OpenAI's format, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.token_bytes import token_names
from deepspeed.serving.chat_format import AnswerParser
from deepspeed.serving.ipc import ScoredToken, TokenChunk

DONE = "data: [DONE]\n\n"
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
LOWEST = -9999.0  # log-probability of impossible tokens, since JSON has no infinity


def event(body: dict[str, Any]) -> str:
    """Encode `body` as JSON in a server-sent event."""
    return f"data: {_encoded(body)}\n\n"


def _reasoning(text: str) -> dict[str, str]:
    """Return the fields of reasoning, under the names of vLLM and of its older versions; none without a text."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


@dataclass(frozen=True)
class TokenInfo:
    """Log-probabilities of one position of an answer.

    Attributes:
        tokens: (token, log-probability, bytes that it would add to the text): the chosen one, then the most probable.
            The log-probability is None for the first token of a prompt.
        offset: characters of the answer before it.
        ends: whether the chosen token ends the answer and is not in its text.
    """

    tokens: list[tuple[int, float | None, bytes]]
    offset: int
    ends: bool


@dataclass(eq=False)
class ResponseChoice:
    """State of one answer.

    Attributes:
        index: index among the answers of the request.
        prompt: token ids of the prompt.
        stream: detokenizer of the answer.
        lead: text before the answer's first token: the prompt, for requests with `echo`.
        parser: parser of a chat's reasoning and calls of tools; None: the answer is its text.
        tokens: number of generated tokens so far.
        text, logprobs: parts so far; only used without streaming.
        reason: finish reason; None while the answer is generated.
        prompt_infos: function of the prompt's log-probabilities, for answers that begin with them; None: other answers.
        scored: log-probabilities of the prompt's tokens.
        cached: number of tokens of the prompt that came from the prefix cache.
        embedding: pooled hidden states, for requests for embeddings.
    """

    index: int
    prompt: list[int]
    stream: TextStream
    lead: str = ""
    parser: AnswerParser | None = None
    tokens: int = 0
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    reason: str | None = None
    prompt_infos: Callable[[list[ScoredToken | None]], list[TokenInfo]] | None = None
    scored: list[ScoredToken | None] | None = None
    cached: int = 0
    embedding: list[float] | None = None
    _shift: int = 0  # characters of the prompt, where log-probabilities begin with it

    def take(self, part: TokenChunk) -> tuple[str, list[TokenInfo]]:
        """Detokenize a chunk of tokens; returns the new text and the log-probabilities."""
        self.tokens += len(part.tokens)
        ends, infos, text = part.finish_reason is not None, [], ""
        last = part.tokens[-1:] if ends else []
        self.cached, self.embedding = part.cached_tokens, part.embedding
        if part.prompt_logprobs is not None:
            self.scored = part.prompt_logprobs
            if self.prompt_infos is not None:
                infos, self._shift = self.prompt_infos(part.prompt_logprobs), len(self.lead)
        for number, token in enumerate(part.tokens):
            closing = ends and number == len(part.tokens) - 1
            if part.logprobs is not None:
                infos.append(self._info(*part.logprobs[number], ends=closing and part.matched == token))
            text += "" if closing else self.stream.push([token])
        if ends:
            text += self.stream.finish(last, part.matched)
            self.reason = part.finish_reason
        text, self.lead = self.lead + text, ""
        return text, infos

    def _info(self, token: int, value: float, top: Sequence[tuple[int, float]], ends: bool) -> TokenInfo:
        pairs: list[tuple[int, float | None]] = [(token, value), *top]
        pieces = [(other, number, self.stream.piece(other)) for other, number in pairs]
        return TokenInfo(pieces, self._shift + self.stream.offset(token), ends)


class ResponseFormatter:
    """Formatter of the responses to one request.

    Args:
        model: name of the model.
        tokenizer: the model's tokenizer.
        chat: whether answers are chat messages instead of text.
        wants_logprobs: whether responses have log-probabilities.
        ident: id of the request, which that of the response contains; "": a new one.
    """

    def __init__(self, model: str, tokenizer: Any, chat: bool, wants_logprobs: bool, ident: str = "") -> None:
        self._tokenizer, self._chat, self._wants = tokenizer, chat, wants_logprobs
        self.ident = f"{'chatcmpl' if chat else 'cmpl'}-{ident or uuid.uuid4().hex}"
        self._head = {"id": self.ident, "created": int(time.time()), "model": model}

    def say_version(self, version: int) -> None:
        """Put the number of updates of the weights into all bodies of this answer, as `weights_version`."""
        self._head["weights_version"] = version

    def whole(self, choices: list[ResponseChoice]) -> dict[str, Any]:
        """Return the response with all finished choices, for a request without streaming."""
        bodies = []
        for choice in choices:
            text = "".join(choice.text)
            content = {"message": self._message(choice, text)} if self._chat else {"text": text}
            logprobs, reason = self._logprobs(choice.logprobs), self._reason(choice)
            bodies.append({"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": bodies, "usage": self._usage(choices)}

    def first(self, choice: ResponseChoice) -> dict[str, Any]:
        """Return the first chunk of a choice in a chat, with the role and no text."""
        return self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def chunk(self, choice: ResponseChoice, text: str, logprobs: list[TokenInfo]) -> dict[str, Any] | None:
        """Return a chunk with new text and its log-probabilities; the last chunk of a choice has the finish reason.

        None if a parser holds the text back and nothing else is new.
        """
        content: dict[str, Any] = {"text": text}
        if self._chat and choice.parser is None:
            content = {"delta": {"content": text} if text or choice.reason is None else {}}
        elif self._chat and choice.parser is not None:
            delta = choice.parser.push(text, choice.reason is not None)
            parts = {"content": delta.content, "tool_calls": delta.calls, **_reasoning(delta.reasoning)}
            content = {"delta": {key: part for key, part in parts.items() if part}}
            if not content["delta"] and not logprobs and choice.reason is None:
                return None
        return self._chunk(choice.index, content, self._logprobs(logprobs), self._reason(choice))

    @staticmethod
    def _message(choice: ResponseChoice, text: str) -> dict[str, Any]:
        """Return the message of a finished choice: the same parts that its chunks would have."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.parser is None:
            return message
        delta, calls = choice.parser.push(text, final=True), []
        for part in delta.calls:
            if "id" in part:
                calls.append({key: part[key] for key in ("id", "type")} | {"function": dict(part["function"])})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        message["content"] = delta.content if delta.content or not (calls or delta.reasoning) else None
        return message | ({"tool_calls": calls} if calls else {}) | _reasoning(delta.reasoning)

    @staticmethod
    def _reason(choice: ResponseChoice) -> str | None:
        calls = choice.parser is not None and choice.parser.called
        return "tool_calls" if calls and choice.reason == "stop" else choice.reason

    def last(self, choices: list[ResponseChoice]) -> dict[str, Any]:
        """Return the final chunk of a stream, with the numbers of prompt and answer tokens (`usage`)."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": self._usage(choices)}

    @staticmethod
    def _usage(choices: list[ResponseChoice]) -> dict[str, Any]:
        """Count prompt and answer tokens; a prompt with several answers counts once, with the first's cached tokens."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
        read, written = sum(prompts.values()), sum(choice.tokens for choice in choices)
        cached = sum({id(choice.prompt): choice.cached for choice in reversed(choices)}.values())
        usage: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return usage | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": kind, "choices": [choice]}

    # -- log-probabilities ----------------------------------------------------------------------------------------

    def _logprobs(self, infos: list[TokenInfo]) -> dict[str, Any] | None:
        if not self._wants:
            return None
        if self._chat:
            content = []
            for info in infos:
                chosen, *top = self._described(info)
                content.append({**chosen, "top_logprobs": top})
            return {"content": content, "refusal": None}
        described = [self._described(info) for info in infos]
        return {
            "tokens": [chosen["token"] for chosen, *_ in described],
            "token_logprobs": [chosen["logprob"] for chosen, *_ in described],
            "top_logprobs": [
                None if chosen["logprob"] is None else {entry["token"]: entry["logprob"] for entry in (*top, chosen)}
                for chosen, *top in described
            ],
            "text_offset": [info.offset for info in infos],
        }

    def _described(self, info: TokenInfo) -> list[dict[str, Any]]:
        """Describe the tokens of one position in the form of chats."""
        names = token_names(self._tokenizer, [(token, text) for token, _, text in info.tokens])
        described: list[dict[str, Any]] = [
            {"token": name, "logprob": None if value is None else max(value, LOWEST), "bytes": list(text)}
            for name, (_, value, text) in zip(names, info.tokens, strict=True)
        ]
        if info.ends:
            described[0]["bytes"] = []
        return described
