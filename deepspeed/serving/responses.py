"""Responses in OpenAI's format, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from deepspeed.inference.detokenizer import TextStream
from deepspeed.serving.ipc import TokenChunk

DONE = "data: [DONE]\n\n"
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(body: dict[str, Any]) -> str:
    """Encode `body` as JSON in a server-sent event."""
    return f"data: {_encoded(body)}\n\n"


@dataclass(eq=False)
class ResponseChoice:
    """State of one answer.

    Attributes:
        index: index among the answers of the request.
        prompt: token ids of the prompt.
        stream: detokenizer of the answer.
        lead: text before the answer's first token: the prompt, for requests with `echo`.
        tokens: number of generated tokens so far.
        text, logprobs: parts so far; only used without streaming.
        offset: offset of the next token in characters, for the log-probabilities of completions.
        reason: finish reason; None while the answer is generated.
    """

    index: int
    prompt: list[int]
    stream: TextStream
    lead: str = ""
    tokens: int = 0
    text: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    offset: int = 0
    reason: str | None = None

    def take(self, part: TokenChunk) -> tuple[str, list[Any]]:
        """Detokenize a chunk of tokens; returns the new text and the log-probabilities."""
        self.tokens += len(part.tokens)
        if part.finish_reason is None:
            text = self.stream.push(part.tokens)
        else:
            text = self.stream.finish(part.tokens, part.matched)
            self.reason = part.finish_reason
        text, self.lead = self.lead + text, ""
        return text, list(part.logprobs or [])


class ResponseFormatter:
    """Formatter of the responses to one request.

    Args:
        model: name of the model.
        tokenizer: the model's tokenizer.
        chat: whether answers are chat messages instead of text.
        wants_logprobs: whether responses have log-probabilities.
    """

    def __init__(self, model: str, tokenizer: Any, chat: bool, wants_logprobs: bool) -> None:
        self._tokenizer, self._chat, self._wants = tokenizer, chat, wants_logprobs
        self.ident = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": self.ident, "created": int(time.time()), "model": model}

    def whole(self, choices: list[ResponseChoice]) -> dict[str, Any]:
        """Return the response with all finished choices, for a request without streaming."""
        bodies = []
        for choice in choices:
            text = "".join(choice.text)
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._chat else {"text": text}
            choice.offset = 0
            logprobs = self._logprobs(choice, choice.logprobs)
            bodies.append({"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.reason})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": bodies, "usage": self._usage(choices)}

    def first(self, choice: ResponseChoice) -> dict[str, Any]:
        """Return the first chunk of a choice in a chat, with the role and no text."""
        return self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def chunk(self, choice: ResponseChoice, text: str, logprobs: list[Any]) -> dict[str, Any]:
        """Return a chunk with new text and its log-probabilities; the last chunk of a choice has the finish reason."""
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"delta": {"content": text} if text or choice.reason is None else {}}
        return self._chunk(choice.index, content, self._logprobs(choice, logprobs), choice.reason)

    def last(self, choices: list[ResponseChoice]) -> dict[str, Any]:
        """Return the final chunk of a stream, with the numbers of prompt and answer tokens (`usage`)."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": self._usage(choices)}

    @staticmethod
    def _usage(choices: list[ResponseChoice]) -> dict[str, int]:
        """Count prompt and answer tokens; a prompt with several answers counts once."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
        read, written = sum(prompts.values()), sum(choice.tokens for choice in choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": kind, "choices": [choice]}

    # -- log-probabilities ----------------------------------------------------------------------------------------

    def _logprobs(self, choice: ResponseChoice, logprobs: list[Any]) -> dict[str, Any] | None:
        if not self._wants:
            return None
        if self._chat:
            content = [
                {**self._named(token, value), "top_logprobs": [self._named(*other) for other in top]}
                for token, value, top in logprobs
            ]
            return {"content": content, "refusal": None}
        names = [self._name(token) for token, _, _ in logprobs]
        offsets = []
        for name in names:
            offsets.append(choice.offset)
            choice.offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [value for _, value, _ in logprobs],
            "top_logprobs": [{self._name(token): value for token, value in top} for _, _, top in logprobs],
            "text_offset": offsets,
        }

    def _named(self, token: int, value: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}

    def _name(self, token: int) -> str:
        """Return a token's text; tokens without a whole character get the vocabulary's spelling, so names differ."""
        text = self._tokenizer.decode([token])
        return self._tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text or not text else text
