"""Requests as clients send them: histories with answers and tools, and tokens by number."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from deepspeed.serving.protocol import APIError, ChatCompletionRequest, CompletionRequest

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
BROKEN, EMPTY = {"name": "f", "arguments": "{broken"}, {"name": "f", "arguments": {}}
AS_OBJECT = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}


def parsed(*messages: Any) -> list[dict[str, Any]]:
    """What the chat template gets for these messages."""
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return [message.plain() for message in ChatCompletionRequest.parse(body).messages]


def refused(body: dict[str, Any], kind: Any = ChatCompletionRequest) -> APIError:
    with pytest.raises(APIError) as caught:
        request = kind.parse(json.dumps({"model": "m", **body}).encode())
        request.check_tokens(100)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("message", "template"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        (
            {"role": "assistant", "content": "hi", "tool_calls": None, "function_call": None, "audio": None},
            {"role": "assistant", "content": "hi"},
        ),
        ({"role": "assistant", "content": "hi", "tool_calls": []}, {"role": "assistant", "content": "hi"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [AS_OBJECT]},
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "index": 0, "function": BROKEN}]},
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": BROKEN}]},
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": EMPTY}]},
        ),
        (
            {"role": "tool", "content": "42", "tool_call_id": "call_1"},
            {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        ),
        (
            {"role": "tool", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "name": "f"},
            {"role": "tool", "content": "4\n2", "name": "f"},
        ),
        ({"role": "function", "name": "f", "content": "42"}, {"role": "tool", "content": "42", "name": "f"}),
        (
            {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"},
            {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"},
        ),
        (
            {"role": "assistant", "content": "4", "reasoning": "2 + 2", "reasoning_content": None, "annotations": [1]},
            {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "b"]},
            {"role": "user", "content": "a\nb"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": "msg_1", "createdAt": 5},
            {"role": "assistant", "content": "no"},
        ),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "developer", "content": "be kind", "name": "x"}, {"role": "system", "content": "be kind"}),
        ({"role": "user", "content": "a", "some_new_field": None}, {"role": "user", "content": "a"}),
    ],
)  # fmt: skip
def test_messages_as_clients_send_them_back(message: dict[str, Any], template: dict[str, Any]) -> None:
    assert parsed(message) == [template]


def test_an_answer_as_the_official_client_dumps_it() -> None:
    forms: list[dict[str, Any]] = [{}, {"exclude_none": True}, {"exclude_unset": True}]
    for options in forms:
        answer = ChatCompletionMessage(role="assistant", content="hi", refusal=None)
        assert parsed(answer.model_dump(**options)) == [{"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "content"),
        ({"role": "user", "content": [3]}, "content"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "robot", "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({"role": "assistant", "content": "x", "prefix": True}, "prefix"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "tool_calls"),
        ("text", "messages.0"),
        (None, "messages.0"),
    ],
)
def test_messages_that_say_something_unknown_are_refused_by_name(message: Any, said: str) -> None:
    error = refused({"messages": [{"role": "user", "content": "a"}, message]})
    assert said.replace("messages.0", "messages.1") in str(error) and error.param == "messages"


@pytest.mark.parametrize(
    "key", ["1_0", " 7 ", "+7", "-7", "07", "7.0", "٣", "1e1", "", "x", "0x7", "9" * 30, "9" * 5000, "100", "7\n"]
)
def test_keys_of_logit_bias_are_numbers_of_tokens(key: str) -> None:
    error = refused({"prompt": "a", "logit_bias": {key: 1}}, CompletionRequest)
    assert error.param == "logit_bias" and error.code == "invalid_value" and len(str(error)) < 200


@pytest.mark.parametrize("token", [-1, 100, 2**40, 2**70])
@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_every_token_is_checked_against_the_model(name: str, token: int) -> None:
    values: Any = [5, token] if name == "stop_token_ids" else {"5": 1, str(token): 1}
    assert refused({"prompt": "a", name: values}, CompletionRequest).param == name
    sound: Any = [0, 99] if name == "stop_token_ids" else {"0": 1, "99": -1}
    CompletionRequest.parse(json.dumps({"model": "m", "prompt": "a", name: sound}).encode()).check_tokens(100)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}),
        ({"temperature": 0}, {"temperature": 0, "top_k": 20, "repetition_penalty": 1.1}),
        ({"top_k": -1}, {"temperature": 0.6, "top_k": 0, "repetition_penalty": 1.1}),
        ({"top_k": 0, "repetition_penalty": 1}, {"temperature": 0.6, "top_k": 0, "repetition_penalty": 1}),
        ({"temperature": None, "top_k": 3}, {"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.1}),
    ],
)
def test_defaults_hold_for_what_a_request_leaves_out(fields: dict[str, Any], found: dict[str, Any]) -> None:
    request = CompletionRequest.parse(json.dumps({"model": "m", "prompt": "a", **fields}).encode())
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 7}
    sampling = request.sampling(5, defaults)
    assert {name: sampling[name] for name in found} == found and sampling["max_new_tokens"] == 5
    assert request.sampling(5, {})["temperature"] == (0 if fields.get("temperature") == 0 else 1)
