"""Requests in OpenAI's format: fields, checks and errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepspeed.errors import DeepSpeedError, RequestError, UsageError
from deepspeed.inference.sampling_params import BEAM_OPTIONS, sampling_defaults
from deepspeed.inference.structured_output import StructuredOutput
from deepspeed.serving.constraints import ConstrainedRequest
from deepspeed.serving.ipc import Accepted, Refused

# Fields without effect on the answer: accepted and ignored.
IGNORED_FIELDS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
# by field: values without effect, which are accepted; fields of a class of requests are not refused there
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "none"), "functions": (None, []), "function_call": (None, "none"),
    "parallel_tool_calls": (None, True, False), "suffix": (None, ""), "audio": (None,), "modalities": (None, ["text"]),
    "prediction": (None,), "web_search_options": (None,), "reasoning_effort": (None,), "verbosity": (None,),
    "dimensions": (None,),
}  # fmt: skip


# Fields that need `use_beam_search`; by field, values without effect.
BEAM_FIELDS: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1), "length_penalty": (None, 1.0), "early_stopping": (None, False),
}  # fmt: skip

# Fields of messages without meaning for a chat template, which clients keep in their histories.
IGNORED_MESSAGE_FIELDS = {
    "id", "annotations", "audio", "created_at", "createdAt", "metadata", "provider_specific_fields",
    "reasoning_details", "thinking_blocks", "timestamp", "type",
}  # fmt: skip
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # field by type
_TOKEN = re.compile("0|[1-9][0-9]{0,18}")


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


def answer_error(error: Exception) -> APIError:
    """Return the error response for an exception while an answer is formed."""
    if isinstance(error, APIError):
        return error
    return APIError(500, f"{type(error).__name__}: {error}", code="model_error")


def check_tokens(name: str, tokens: Iterable[int], size: int | None) -> None:
    """Raise `APIError` (400) if a token of the field `name` is not in a vocabulary of `size` tokens (None: unknown)."""
    for token in tokens:
        if token < 0 or (size is not None and token >= size):
            known = f"numbers from 0 to {size - 1}" if size is not None else "numbers of at least 0"
            raise APIError(400, f"{name}: tokens are {known}, and {token} is none", name, "invalid_value")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = False
    include_obfuscation: bool | None = False  # nothing is padded


class JsonBody(BaseModel):
    """JSON body of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
            if name in fields and name not in cls.model_fields and fields.pop(name) not in idle:
                text = f"{name} is not available: this server does not have it"
                raise APIError(400, text, name, "unsupported_parameter")
        try:
            return cls.model_validate({name: field for name, field in fields.items() if name not in IGNORED_FIELDS})
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            depth = 3 if first["loc"][:1] == ("messages",) else 2
            where = ".".join(str(part) for part in first["loc"][:depth])
            code = "unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
            text = "is unknown" if code == "unknown_parameter" else first["msg"]
            raise APIError(400, f"{where}: {text}", str(first["loc"][0]) if first["loc"] else None, code) from None


class BaseRequest(JsonBody, ConstrainedRequest):
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
    use_beam_search: bool | None = False
    best_of: int | None = Field(None, ge=1)
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > 4 or not all(stops):
            raise APIError(400, f"stop: up to 4 strings that are not empty; got {len(stops)}", "stop", "invalid_value")
        return stops

    def constraint(self) -> StructuredOutput | None:
        """Return the constraint on the text of the answer, None if there is none; raises `APIError` (400)."""
        try:
            return self.structured()
        except RequestError as error:
            raise APIError(400, str(error), str(error).partition(":")[0], "invalid_value") from None

    def check_tokens(self, size: int | None) -> None:
        """Raise `APIError` (400) if an option names a token outside of a vocabulary of `size` tokens."""
        check_tokens("stop_token_ids", self.stop_token_ids or (), size)
        check_tokens("logit_bias", self._bias() or (), size)

    def wanted_tokens(self) -> int | None:
        """Return the maximum number of tokens of the answer; None: limited by the model's context length only."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None: no log-probabilities."""
        return None

    def beams(self) -> int:
        """Return the number of beams: `best_of`, else `n`; 1 without `use_beam_search`.

        Raises:
            APIError: status 400: an option is only available with, or not available with, beams.
        """
        if not self.use_beam_search:
            for name, idle in BEAM_FIELDS.items():
                if getattr(self, name) not in idle:
                    raise APIError(400, f"{name}: only with use_beam_search: true", name, "invalid_value")
            return 1
        for name, idle in sampling_defaults().items():
            if name in BEAM_OPTIONS or name not in type(self).model_fields:
                continue
            if getattr(self, name) not in ((None, 0, -1) if name == "top_k" else (None, idle)):
                text = f"{name} is not available with use_beam_search, which follows the model's own probabilities"
                raise APIError(400, text, name, "unsupported_parameter")
        constrained = None if (constraint := self.constraint()) is None else constraint.field
        if field := constrained or self._unlike_beams():
            raise APIError(400, f"{field} is not available with use_beam_search", field, "unsupported_parameter")
        width = self.best_of or self.n or 1
        if width < (self.n or 1):
            raise APIError(400, f"best_of {width} is less than n {self.n}", "best_of", "invalid_value")
        return width

    def _unlike_beams(self) -> str | None:
        """Return the name of a field of this kind of requests that beams do not have; None: none is set."""
        return None

    def scored(self) -> int | None:
        """Return the number of alternatives per token of the prompt; None: the prompt is not scored.

        Raises:
            APIError: status 400: `prompt_logprobs` with `stream`.
        """
        if self.prompt_logprobs is not None and self.stream:
            text = "prompt_logprobs: not with stream: true"
            raise APIError(400, text, "prompt_logprobs", "invalid_value")
        return self.prompt_logprobs

    def sampling(self, most: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `SamplingParams`, except `index`.

        Args:
            most: maximum number of new tokens.
            defaults: values for options that the request leaves out.

        Raises:
            APIError: status 400: a field is invalid, such as `min_tokens` above `most`.
        """
        options: dict[str, Any] = {
            "max_new_tokens": most, "temperature": self.temperature,
            "top_p": self.top_p, "top_k": 0 if self.top_k == -1 else self.top_k, "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty, "seed": self.seed, "stop": self.stops(),
            "stop_token_ids": tuple(self.stop_token_ids or ()), "ignore_eos": bool(self.ignore_eos),
            "min_new_tokens": self.min_tokens, "logprobs": self.wanted_logprobs(), "logit_bias": self._bias(),
            "prompt_logprobs": self.scored(),
        }  # fmt: skip
        if self.min_tokens is not None and self.min_tokens > most:
            raise APIError(
                400, f"min_tokens {self.min_tokens} is more than max_tokens {most}", "min_tokens", "invalid_value"
            )
        stated = {key: value for key, value in options.items() if value is not None}
        if self.use_beam_search:
            return self._beam_sampling(stated)
        return {"temperature": 1.0, **defaults, **stated}

    def _beam_sampling(self, stated: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a beam search; one beam is the greedy answer."""
        options = {key: stated[key] for key in stated if key in BEAM_OPTIONS or key == "prompt_logprobs"}
        if (beams := self.beams()) > 1:
            own = {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
            options |= {"beams": beams, **{key: value for key, value in own.items() if value is not None}}
        return options

    def _bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for token in self.logit_bias:
            if not _TOKEN.fullmatch(token):
                text = f"logit_bias: keys are numbers of tokens in decimal digits, not {token[:40]!r}"
                raise APIError(400, text, "logit_bias", "invalid_value")
        biases = {int(token): bias for token, bias in self.logit_bias.items()}
        if any(not -100 <= bias <= 100 for bias in biases.values()):
            raise APIError(400, "logit_bias: values are from -100 to 100", "logit_bias", "invalid_value")
        return biases


class CompletionRequest(BaseRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=5)
    max_tokens: int | None = Field(None, ge=0)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the texts, or the token ids of each prompt; raises `APIError` (400) if there are none."""
        return self.listed("prompt", self.prompt)

    @staticmethod
    def listed(name: str, prompts: Any) -> list[str] | list[list[int]]:
        """Return the field `name`, a text, texts, tokens or lists of them, as a list of texts or lists of tokens."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts or not all(prompts) and any(isinstance(prompt, list) for prompt in prompts):
            raise APIError(400, f"{name}: an empty list holds nothing to go on from", name, "invalid_value")
        return prompts

    def _unlike_beams(self) -> str | None:
        return "echo" if self.echoes_logprobs() else None

    def echoes_logprobs(self) -> bool:
        """Return whether the answer has log-probabilities of the prompt's tokens before its own."""
        return bool(self.echo) and self.logprobs is not None

    def scored(self) -> int | None:
        """Return the number of alternatives per token of the prompt; None: the prompt is not scored.

        Raises:
            APIError: status 400: `prompt_logprobs` with `stream`, or `max_tokens` 0 without any of the options that
                return something then.
        """
        own = super().scored()
        if self.echoes_logprobs():
            return max(own or 0, self.logprobs or 0)
        if self.max_tokens == 0 and own is None:
            if not self.echo:
                text = "max_tokens: 0 new tokens need echo or prompt_logprobs, else there is nothing to answer"
                raise APIError(400, text, "max_tokens", "invalid_value")
            return 0
        return own

    def wanted_tokens(self) -> int | None:
        """Return the maximum number of tokens of the answer; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class FunctionCall(BaseModel):
    """Call of a function in a message: its name, and its arguments as JSON text or as an object."""

    model_config = ConfigDict(extra="ignore", strict=True)
    name: str
    arguments: str | dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the call for chat templates, which take arguments as an object."""
        arguments: Any = self.arguments or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):  # a model may have written anything; templates print it as it is
                pass
        return {"name": self.name, "arguments": arguments}


class ToolCall(BaseModel):
    """Entry of `tool_calls` of an assistant's message."""

    model_config = ConfigDict(extra="ignore", strict=True)
    id: str | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """Return the call for chat templates."""
        return {"type": "function", "function": self.function.plain(), **({"id": self.id} if self.id else {})}


class ChatMessage(BaseModel):
    """Message of a chat, also as clients keep answers in their histories."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, message: Any) -> Any:
        """Leave out fields without a meaning here, and fields without a value."""
        if not isinstance(message, dict):
            return message
        fields = {key: value for key, value in message.items() if key not in IGNORED_MESSAGE_FIELDS}
        return {key: value for key, value in fields.items() if key in cls.model_fields or value not in (None, [], {})}

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: Any) -> Any:
        """Join a list of text parts by newlines."""
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else part
            if isinstance(text, dict):
                raise ValueError(f"parts of the type {str(kind)[:40]!r} are not available: this model reads text")
            if not isinstance(text, str):
                raise ValueError("a list holds parts with a type and a text")
            texts.append(text)
        return "\n".join(texts)

    def plain(self) -> dict[str, Any]:
        """Return the message for chat templates.

        The content is always a text; "developer" becomes "system", and the older "function" becomes "tool".
        """
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        calls = [call.plain() for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append({"type": "function", "function": self.function_call.plain()})
        more = {"tool_calls": calls, "reasoning_content": self.reasoning_content or self.reasoning}
        if role == "tool":
            more |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {key: value for key, value in more.items() if value}


class ToolFunction(BaseModel):
    """Function that a model may call. `strict` changes nothing: arguments of forced calls follow the schema anyway."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Entry of `tools`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"] = "function"
    function: ToolFunction

    def plain(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        function = {"parameters": {"type": "object", "properties": {}}, **self.function.model_dump(exclude_none=True)}
        function.pop("strict", None)
        return {"type": "function", "function": {"name": function.pop("name"), "description": "", **function}}


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class NamedTool(BaseModel):
    """`tool_choice` that names the function to be called."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"] = "function"
    function: FunctionName


# Arguments of `apply_chat_template`, which are the server's own.
_TEMPLATE_OPTIONS = {
    "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "messages",
}  # fmt: skip


class ChatCompletionRequest(BaseRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _tools_fit(self) -> Any:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: names have to differ")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name!r:.80}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: there are no tools")
        refused = sorted(_TEMPLATE_OPTIONS.intersection(self.chat_template_kwargs or ()))
        if refused:
            raise ValueError(f"chat_template_kwargs: {refused[0]} is the server's own")
        return self

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings; none for an answer that has to call, since they would cut its arguments."""
        stops = super().stops()
        return () if self.forced_tools() else stops

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def _unlike_beams(self) -> str | None:
        return "tool_choice" if self.forced_tools() else None

    def forced_tools(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schemas of the arguments of the tools of which one has to be called, by name; {}: of none."""
        if self.tool_choice in (None, "auto", "none"):
            return {}
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        tools = [tool.function for tool in self.tools or () if named in (None, tool.function.name)]
        return {tool.name: tool.parameters or {"additionalProperties": False} for tool in tools}

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


async def carry_out(engine: Any, message: Callable[[int], Any], field: str | None = None) -> Accepted:
    """Send `message(number)`, which is no request for an answer, to the engine; returns what it reports at the end.

    Args:
        engine: the `EngineProcess`.
        message: function of the message's number.
        field: field of the client's body that a refusal names.

    Raises:
        APIError: status 400: the engine refuses it; 503: the engine has ended.
    """
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def put(result: Any) -> None:
        if not answer.done():
            answer.set_result(result)

    try:
        ident = engine.ask(message, put)
    except UsageError as error:
        raise APIError(503, str(error), code="engine_ended") from None
    try:
        result = await answer
    finally:
        engine.live.pop(ident, None)
    if isinstance(result, Refused):
        raise APIError(400, result.reason, field, result.code)
    if not isinstance(result, Accepted):
        raise APIError(503, "the engine has ended", code="engine_ended")
    return result
