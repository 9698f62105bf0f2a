"""Requests in OpenAI's format: fields, checks and errors."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed.errors import DeepSpeedError

# Fields without effect on the answer: accepted and ignored.
IGNORED_FIELDS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
}  # fmt: skip
# by field: values without effect, which are accepted
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "none"), "functions": (None, []), "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}), "suffix": (None, ""), "audio": (None,), "modalities": (None, ["text"]),
    "prediction": (None,), "web_search_options": (None,), "reasoning_effort": (None,), "verbosity": (None,),
    "guided_json": (None,), "guided_regex": (None,), "best_of": (None, 1),
}  # fmt: skip


class APIError(DeepSpeedError):
    """Error response in OpenAI's format.

    Args:
        status: HTTP status.
        message: text for the client.
        param: name of the invalid field; None: no single field.
        code: OpenAI's error code, such as "model_not_found".
        kind: OpenAI's error type; "": "invalid_request_error" for a status below 500, else "server_error".
        retry_after: seconds until the client may retry; None: not stated.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str = "",
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """Return the response body in OpenAI's format."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = False
    include_obfuscation: bool | None = False  # nothing is padded


class BaseRequest(BaseModel):
    """Common fields of completion and chat requests; null has the same effect as a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    ignore_eos: bool | None = False
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[int] | None = None

    @classmethod
    def parse(cls, body: bytes) -> Any:
        """Parse the JSON body of a request into an instance of this class.

        Raises:
            APIError: status 400: the body is invalid, or a field is unknown, invalid or not supported.
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(fields, dict):
            raise APIError(400, f"The body has to be a JSON object, not {type(fields).__name__}", code="invalid_json")
        for name, idle in UNSUPPORTED_FIELDS.items():
            if name in fields and fields.pop(name) not in idle:
                text = f"{name} is not available: this server does not have it"
                raise APIError(400, text, name, "unsupported_parameter")
        try:
            return cls.model_validate({name: field for name, field in fields.items() if name not in IGNORED_FIELDS})
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"][:2])
            code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
            text = "is unknown" if code == "unknown_parameter" else first["msg"]
            raise APIError(400, f"{where}: {text}", str(first["loc"][0]) if first["loc"] else None, code) from None

    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > 4 or not all(stops):
            raise APIError(400, f"stop: up to 4 strings that are not empty; got {len(stops)}", "stop", "invalid_value")
        return stops

    def wanted_tokens(self) -> int | None:
        """Return the maximum number of tokens of the answer; None: limited by the model's context length only."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None: no log-probabilities."""
        return None

    def sampling(self, most: int) -> dict[str, Any]:
        """Return the keyword arguments of `SamplingParams`, except `index`, for at most `most` new tokens.

        Raises:
            APIError: status 400: a field is invalid, such as `min_tokens` above `most`.
        """
        options: dict[str, Any] = {
            "max_new_tokens": most, "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p, "top_k": None if self.top_k == -1 else self.top_k, "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty, "seed": self.seed, "stop": self.stops(),
            "stop_token_ids": tuple(self.stop_token_ids or ()), "ignore_eos": bool(self.ignore_eos),
            "min_new_tokens": self.min_tokens, "logprobs": self.wanted_logprobs(), "logit_bias": self._bias(),
        }  # fmt: skip
        if self.min_tokens is not None and self.min_tokens > most:
            raise APIError(
                400, f"min_tokens {self.min_tokens} is more than max_tokens {most}", "min_tokens", "invalid_value"
            )
        return {key: value for key, value in options.items() if value is not None}

    def _bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        try:
            biases = {int(token): bias for token, bias in self.logit_bias.items()}
        except ValueError:
            raise APIError(400, "logit_bias: keys are numbers of tokens", "logit_bias", "invalid_value") from None
        if any(not -100 <= bias <= 100 for bias in biases.values()):
            raise APIError(400, "logit_bias: values are from -100 to 100", "logit_bias", "invalid_value")
        return biases


class CompletionRequest(BaseRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=5)

    def prompts(self) -> list[str] | list[list[int]]:
        prompts: Any = self.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts or not all(prompts) and any(isinstance(prompt, list) for prompt in prompts):
            raise APIError(400, "prompt: an empty list holds nothing to go on from", "prompt", "invalid_value")
        return prompts

    def wanted_tokens(self) -> int | None:
        """Return the maximum number of tokens of the answer; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class Text(BaseModel):
    """Text part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Message of a chat; `name` and `refusal` have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Text]
    name: str | None = None
    refusal: str | None = None

    def plain(self) -> dict[str, str]:
        """Return {"role", "content"} for chat templates; the role "developer" becomes "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(BaseRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def wanted_tokens(self) -> int | None:
        """Return the maximum number of tokens of the answer: `max_completion_tokens`, else `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None: no log-probabilities.

        Raises:
            APIError: status 400: `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs: needs logprobs: true", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None
