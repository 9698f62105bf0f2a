"""Requests and answers of `POST /v1/embeddings`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any, Literal

from pydantic import Field

from deepspeed.serving.protocol import APIError, ChatMessage, CompletionRequest, JsonBody


class EmbeddingRequest(JsonBody):
    """Body of `POST /v1/embeddings`."""

    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = "float"
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the texts, or the token ids of each; raises `APIError` (400) if there are none."""
        return CompletionRequest.listed("input", self.input)


class TokenizeRequest(JsonBody):
    """Body of `POST /tokenize`, as of vLLM: a prompt, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False

    def callable_tools(self) -> tuple[()]:
        """Return the tools of the chat: none."""
        return ()

    def check(self) -> None:
        """Raise `APIError` (400) unless there is either a prompt or messages."""
        if (self.prompt is None) == (not self.messages):
            raise APIError(400, "prompt: give either a prompt or messages", "prompt", "invalid_value")


class DetokenizeRequest(JsonBody):
    """Body of `POST /detokenize`, as of vLLM."""

    model: str | None = None
    tokens: list[int]


def normalized(states: list[float]) -> list[float]:
    """Return a vector divided by its length; a vector of zeros as it is."""
    length = math.sqrt(math.fsum(x * x for x in states))
    return [x / length for x in states] if length else states


def embedding_body(request: EmbeddingRequest, model: str, choices: list[Any], normalize: bool) -> dict[str, Any]:
    """Return the answer to a request, for its choices (`ResponseChoice`) with their embeddings."""
    data = []
    for choice in choices:
        vector: Any = normalized(choice.embedding) if normalize else choice.embedding
        if request.encoding_format == "base64":  # little-endian fp32
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        data.append({"object": "embedding", "index": choice.index, "embedding": vector})
    tokens = sum(len(choice.prompt) for choice in choices)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
