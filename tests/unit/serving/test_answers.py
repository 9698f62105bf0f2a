"""Answers of an odd folder right to the byte, and errors planted in every stage of an answer."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed.inference import live_sequence
from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.generator import Generator
from deepspeed.serving import responses
from deepspeed.serving import service as of_service
from deepspeed.serving.chat_format import ChatFormat
from deepspeed.serving.responses import ResponseChoice, ResponseFormatter
from deepspeed.serving.service import Service
from tests.harness.pool import PATIENCE
from tests.unit.serving.inline import InlineServer, inline
from tests.unit.serving.server import END, LENGTH, PADDING, serving

ENDLESS = {"ignore_eos": True, "temperature": 0, "repetition_penalty": 1}
ROOM = 40  # tokens that the cache has room for


@pytest.fixture(scope="module")
def odd(odd_folder: Path) -> Iterator[InlineServer]:
    with inline(odd_folder, {"threads": 1}, allowed_origins=("https://page.example",), drain=0.5) as server:
        yield server


def events(answer: httpx.Response) -> list[Any]:
    """Bodies of the events of a stream; the end mark is a string."""
    lines = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def said(answer: httpx.Response, streamed: bool, chat: bool = False) -> tuple[str, list[Any]]:
    """Text, and log-probabilities in parts."""
    bodies = [body for body in events(answer) if body != "[DONE]"] if streamed else [answer.json()]
    choices = [body["choices"][0] for body in bodies if body["choices"]]
    field = "delta" if streamed else "message"
    text = "".join((choice[field].get("content") or "") if chat else choice["text"] for choice in choices)
    return text, [choice["logprobs"] for choice in choices if choice["logprobs"]]


# -- bytes and names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_of_log_probabilities_join_to_the_text(odd: InlineServer, seed: int, streamed: bool) -> None:
    """A random model writes anything: bytes, special tokens, rows without a token."""
    messages, drawn = [{"role": "user", "content": "x🙂"}], {"seed": seed, "temperature": 2, "top_k": 0}
    body = {"messages": messages, "max_tokens": 40, **drawn,
            "logprobs": True, "top_logprobs": 20, "ignore_eos": True, "stream": streamed}  # fmt: skip
    answer = odd.post("chat/completions", body)
    text, parts = said(answer, streamed, chat=True)
    content = [one for part in parts for one in part["content"]]
    assert len(content) == 40 and b"".join(bytes(one["bytes"]) for one in content).decode("utf-8", "replace") == text
    assert "\ufffd" in text or seed
    for one in content:
        names = {other["token"] for other in (one, *one["top_logprobs"])}
        assert len(names) >= 20 and len({other["token"] for other in one["top_logprobs"]}) == 20
        assert all(isinstance(other["bytes"], list) for other in one["top_logprobs"])


@pytest.mark.parametrize("streamed", [False, True])
def test_names_and_offsets_of_completions(odd: InlineServer, streamed: bool) -> None:
    unknown = len(odd.service.tokenizer) + 3
    body = {"prompt": "the", "max_tokens": 8, "logprobs": 5, "stream": streamed, **ENDLESS}
    text, parts = said(odd.post("completions", body), streamed)
    names, offsets = [sum((part[key] for part in parts), []) for key in ("tokens", "text_offset")]
    tops = sum((part["top_logprobs"] for part in parts), [])
    for name, offset, top in zip(names, offsets, tops, strict=True):
        assert name in top and max(top, key=top.get) == name
        if not name.startswith(("bytes:", "token_id:", "<")):
            assert text[offset:].startswith(name)
    biased = odd.post("completions", {**body, "logit_bias": {str(unknown): 100}})
    text, parts = said(biased, streamed)
    assert text == "" and sum((part["tokens"] for part in parts), []) == [f"token_id:{unknown}"] * 8


def test_impossible_tokens_have_a_number_in_json(odd: InlineServer) -> None:
    """A model whose head bars a token gives minus infinity, which JSON lacks."""
    take = ResponseChoice._info

    def barred(self: Any, token: int, value: float, top: Any, ends: bool) -> Any:
        return take(self, token, -float("inf"), top, ends)

    with mock.patch.object(ResponseChoice, "_info", barred):
        for streamed in (False, True):
            body = {"prompt": "the", "max_tokens": 2, "logprobs": 1, "stream": streamed, **ENDLESS}
            _, parts = said(odd.post("completions", body), streamed)
            assert sum((part["token_logprobs"] for part in parts), []) == [-9999.0] * 2


# -- before the answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, 10**6]}, "prompt"),
        ({"prompt": [[5], [10**12]]}, "prompt"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [5, 10**6]}, "stop_token_ids"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": [5] * LENGTH}, "prompt"),
        ({"max_tokens": LENGTH}, "prompt"),
    ],
)
def test_what_is_wrong_is_a_status_and_no_event(
    odd: InlineServer, fields: dict[str, Any], param: str, streamed: bool
) -> None:
    answer = odd.post("completions", {"prompt": "the", "stream": streamed, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and param in error["message"], answer.text
    odd.until_free()


def test_rows_of_the_model_without_a_token_may_be_in_a_prompt(odd: InlineServer) -> None:
    last = len(odd.service.tokenizer) + PADDING - 1
    assert odd.post("completions", {"prompt": [5, last], "max_tokens": 2}).status_code == 200
    assert odd.post("completions", {"prompt": [5, last + 1], "max_tokens": 2}).status_code == 400


@pytest.mark.parametrize("streamed", [False, True])
def test_what_only_the_engine_can_refuse_is_a_status_too(odd_folder: Path, streamed: bool) -> None:
    page = 2 * 2 * 2 * 8 * 4 * 16  # bytes: keys and values, layers, heads, head size, fp32, tokens
    with inline(odd_folder, {"threads": 1, "cache_bytes": page * (ROOM // 16 + 1)}) as server:
        body = {"prompt": "the", "max_tokens": 60, "stream": streamed, **ENDLESS}
        refused = server.post("completions", body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        several = server.post("completions", {**body, "prompt": [[5], [5] * 30], "max_tokens": 30})
        assert several.status_code == 400, "one of several choices is refused"
        with mock.patch.object(Generator, "submit", side_effect=RuntimeError("planted")):
            failed = server.post("completions", {**body, "max_tokens": 4})
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "model_error"
        assert "planted" in failed.json()["error"]["message"]
        server.until_free()
        assert server.post("completions", {**body, "max_tokens": 4}).status_code == 200


def test_nothing_is_sent_before_the_engine_has_accepted(odd: InlineServer) -> None:
    """And the status comes before the first token."""
    accept, tokens = threading.Event(), threading.Event()
    submit, step = Generator.submit, Generator.step

    def late(self: Any, request: Any) -> None:
        accept.wait(20 * PATIENCE)
        submit(self, request)

    def later(self: Any) -> Any:
        tokens.wait(20 * PATIENCE)
        return step(self)

    body = json.dumps({"model": "tiny", "prompt": "the", "max_tokens": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = httpx.URL(odd.url)
    with mock.patch.object(Generator, "submit", late), mock.patch.object(Generator, "step", later):
        with socket.create_connection((address.host, address.port or 80)) as client:
            client.sendall(head + body)
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            accept.set()
            client.settimeout(20 * PATIENCE)
            first = client.recv(20)
            tokens.set()
            assert first.startswith(b"HTTP/1.1 200")
            received = first
            while b"[DONE]" not in received:
                received += client.recv(4096) or pytest.fail("the stream was cut")
    odd.until_free()


# -- planted errors ----------------------------------------------------------------------------------------------------

STAGES: dict[str, tuple[Any, str]] = {
    "detokenizer of the server": (ResponseChoice, "take"),
    "events": (Service, "_events"),
    "chunk": (ResponseFormatter, "chunk"),
    "whole answer": (ResponseFormatter, "whole"),
    "usage": (ResponseFormatter, "_usage"),
    "names": (responses, "token_names"),
    "bytes": (TextStream, "piece"),
    "end of the text": (TextStream, "finish"),
    "JSON": (of_service, "event"),
    "token in the engine": (live_sequence.LiveSequence, "take"),
    "output of the engine": (live_sequence.Sampler, "next"),
    "submission": (Generator, "submit"),
    "template": (ChatFormat, "text"),
    "tokenizer": (Service, "_tokens"),
    "options": (Service, "room"),
}


@contextlib.contextmanager
def planted(owner: Any, name: str, after: int) -> Iterator[list[int]]:
    """Let a function raise at its call number `after`, counted from 0, and later ones."""
    calls: list[int] = []
    real = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], dict) and "error" in args[0]:  # the event of the error itself
            return real(*args, **kwargs)
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("planted")
        return real(*args, **kwargs)

    static = isinstance(vars(owner).get(name), staticmethod)
    with mock.patch.object(owner, name, staticmethod(broken) if static else broken):
        yield calls


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_any_stage_is_one_error_in_openais_form(
    odd: InlineServer, stage: str, streamed: bool, after: int
) -> None:
    owner, name = STAGES[stage]
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 9, "logprobs": True, "top_logprobs": 3,
            "stream": streamed, "ignore_eos": True, "stop": ["nowhere"]}  # fmt: skip
    if streamed:
        body["stream_options"] = {"include_usage": True}
    with planted(owner, name, after) as calls:
        answer = odd.post("chat/completions", body)
    if len(calls) <= after:  # this answer has not come to that stage so often
        assert answer.status_code == 200
        return
    if answer.status_code == 200:
        assert streamed
        *before, error = events(answer)
        assert all("error" not in one for one in before) and "[DONE]" not in before
    else:
        assert answer.status_code == 500
        error = answer.json()
    assert set(error["error"]) == {"message", "type", "param", "code"}, answer.text
    assert error["error"]["code"] == "model_error" and "planted" in error["error"]["message"]
    odd.until_free()


def test_others_keep_their_answers_beside_a_planted_error(odd: InlineServer) -> None:
    body = {"prompt": "the quick", "max_tokens": 40, **ENDLESS}
    wanted = odd.post("completions", body).json()["choices"]
    take = ResponseChoice.take

    def broken(self: Any, part: Any) -> Any:
        if len(self.prompt) == 1:
            raise RuntimeError("planted")
        return take(self, part)

    found: list[Any] = []
    with mock.patch.object(ResponseChoice, "take", broken):
        beside = [threading.Thread(target=lambda: found.append(odd.post("completions", body).json()["choices"]))
                  for _ in range(3)]  # fmt: skip
        for one in beside:
            one.start()
        failed = [odd.post("completions", {**body, "prompt": [5], "stream": at % 2 == 0}) for at in range(6)]
        for one in beside:
            one.join()
    assert found == [wanted] * 3
    assert [events(one)[-1]["error"]["code"] for one in failed[::2]] == ["model_error"] * 3
    assert [one.status_code for one in failed[1::2]] == [500] * 3
    odd.until_free()


def test_requests_that_are_unfinished_when_the_server_ends_get_an_error(odd: InlineServer) -> None:
    tokens = threading.Event()
    step = Generator.step

    def later(self: Any) -> Any:
        tokens.wait(0.2)
        return step(self)

    found: list[httpx.Response] = []
    body = {"prompt": "the", "max_tokens": 40, **ENDLESS}
    with mock.patch.object(Generator, "step", later):
        asked = [threading.Thread(target=lambda s=s: found.append(odd.post("completions", {**body, "stream": s})))
                 for s in (False, True)]  # fmt: skip
        for one in asked:
            one.start()
        until = time.monotonic() + 20 * PATIENCE
        while len(odd.service.pending) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)  # the stream has begun
        odd.loop.call_soon_threadsafe(odd.service.end_all)
        for one in asked:
            one.join()
        tokens.set()
    errors = [events(one)[-1] if one.status_code == 200 else one.json() for one in found]
    assert sorted(one.status_code for one in found) == [200, 503]
    assert [error["error"]["code"] for error in errors] == ["draining"] * 2
    odd.until_free()


# -- limits, ends, defaults --------------------------------------------------------------------------------------------


def test_the_context_is_the_scaled_one_and_beyond_the_original_length_tokens_are_right(
    odd: InlineServer, odd_folder: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(odd_folder)
    tokenizer = AutoTokenizer.from_pretrained(odd_folder)
    assert httpx.get(f"{odd.url}/v1/models").json()["data"][0]["max_model_len"] == LENGTH
    prompt = tokenizer("def function(argument): return argument + 1", return_tensors="pt")["input_ids"]
    want = model.generate(prompt, max_new_tokens=50, do_sample=False, eos_token_id=10**9, repetition_penalty=1.0)
    body = {"prompt": prompt[0].tolist(), "max_tokens": 50, **ENDLESS}
    found = odd.post("completions", body).json()
    assert len(want[0]) > LENGTH // 4 + 20 and found["usage"]["completion_tokens"] == 50
    watch = TextStream(tokenizer, (), prompt[0].tolist(), skip_special_tokens=True)
    assert found["choices"][0]["text"] == watch.finish(want[0, prompt.shape[1] :].tolist(), None)


def test_end_tokens_and_sampling_defaults_of_the_folder(odd: InlineServer) -> None:
    for end in (2, END):
        body = {"prompt": "the", "logit_bias": {str(end): 100}, "max_tokens": 5}
        answer = odd.post("completions", body).json()
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 1
        assert odd.post("completions", {**body, "ignore_eos": True}).json()["usage"]["completion_tokens"] == 5
    greedy = {"temperature": 0, "repetition_penalty": 1.2}
    asked = [{"prompt": "the", "max_tokens": 24, "ignore_eos": True, **more} for more in ({}, greedy, ENDLESS)]
    texts = [odd.post("completions", body).json()["choices"] for body in asked]
    assert texts[0] == texts[1] != texts[2], "the folder's defaults are greedy with a penalty"
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    assert odd.post("chat/completions", chat).json()["usage"]["completion_tokens"] == 11
    assert odd.post("chat/completions", {**chat, "max_tokens": 20}).json()["usage"]["completion_tokens"] == 20


def test_a_stop_string_waits_for_the_least_number_of_tokens(odd: InlineServer) -> None:
    body = {"prompt": "the quick", "max_tokens": 24, **ENDLESS}
    text, _ = said(odd.post("completions", body), False)
    stop = text[0]
    for least, count in ((0, None), (6, None), (24, 24)):
        asked = {**body, "stop": stop, "min_tokens": least}
        whole = odd.post("completions", asked)
        found, used = said(whole, False)[0], whole.json()["usage"]["completion_tokens"]
        assert text.startswith(found) and used > least - (least == 24) and used == (count or used)
        assert found == ("" if not least else text[: len(found)]) and (least != 24 or found == text)
        assert said(odd.post("completions", {**asked, "stream": True}), True)[0] == found


def test_histories_of_clients_reach_the_template(odd: InlineServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
        {"role": "assistant", "content": "c", "tool_calls": None, "reasoning_content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "e"}]},
    ]
    answer = odd.post("chat/completions", {"messages": history, "max_tokens": 3})
    text = "<user>a\n<assistant>\n<tool>b\n<assistant>c\n<user>e\n<assistant>"
    wanted = len(odd.service.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == wanted


# -- pages in a browser ------------------------------------------------------------------------------------------------


def test_pages_of_an_allowed_origin_may_read_answers_and_errors(odd: InlineServer, odd_folder: Path) -> None:
    page = {"Origin": "https://page.example"}
    asked = {
        **page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    before = httpx.options(f"{odd.url}/v1/chat/completions", headers=asked)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == page["Origin"]
    assert "authorization" in before.headers["access-control-allow-headers"].lower()
    body = {"prompt": "the", "max_tokens": 2}
    with mock.patch.object(ResponseFormatter, "whole", side_effect=RuntimeError("planted")):
        failed = odd.post("completions", body, headers=page)
    bodies = [("completions", body), ("completions", {**body, "stream": True}), ("completions", {**body, "n": 0})]
    answers = [odd.post(path, sent, headers=page) for path, sent in [*bodies, ("nothing", {})]] + [failed]
    assert [one.status_code for one in answers] == [200, 200, 400, 404, 500]
    assert {one.headers["access-control-allow-origin"] for one in answers} == {page["Origin"]}
    other = odd.post("completions", body, headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.slow
def test_a_process_says_its_ends_and_defaults_and_clients_get_whole_answers(odd_folder: Path, tmp_path: Path) -> None:
    """The official client, whole and streamed, with its own dump of an answer in the next request."""
    override = ("--override-generation-config", '{"temperature": 0}', "--allowed-origins", "*")
    with serving(odd_folder, tmp_path / "log", "--served-model-name", "tiny", *override) as server:
        log = server.log.read_text()
        assert f"answers end at 2 '</s>' (generation_config.json, config.json, tokenizer_config.json); {END} " in log
        assert "temperature 0, top_k 1, repetition_penalty 1.2, max_new_tokens 11" in log.replace("\n", " ")
        client: Any = server.client()
        messages: list[Any] = [{"role": "user", "content": "the"}]
        options: Any = {"model": "tiny", "logprobs": True, "top_logprobs": 5, "extra_body": {"ignore_eos": True}}
        for _ in range(2):
            whole = client.chat.completions.create(messages=messages, **options)
            chunks = list(client.chat.completions.create(messages=messages, stream=True, **options))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            content = [
                one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
            ]
            described = [
                [(one.token, one.bytes) for one in part] for part in (whole.choices[0].logprobs.content, content)
            ]
            assert whole.choices[0].message.content == text and described[0] == described[1]
            assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == text
            messages += [whole.choices[0].message.model_dump(), {"role": "user", "content": "a"}]
        assert (
            httpx.get(f"{server.url}/v1/models", headers={"Origin": "x"}).headers["access-control-allow-origin"] == "*"
        )
        assert server.end() == 0
