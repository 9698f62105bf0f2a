"""Structured output, tools and reasoning over HTTP: fields, refusals, streams equal to whole answers, loops."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx
import pytest
from openai import OpenAI

from deepspeed.inference.sampler import Sampler
from deepspeed.inference.structured_output import REMEMBERED, ConstraintCompiler, StructuredOutput
from deepspeed.serving import tool_calls
from deepspeed.serving.chat_format import ChatFormat
from deepspeed.serving.ipc import Submit
from deepspeed.serving.worker import SLOTS, _Compiling
from tests.unit.serving.inline import InlineServer, inline
from tests.unit.serving.server import make_folder
from tests.unit.serving.test_answers import events

pytest.importorskip("llguidance", reason="the extra `serve` has it")
jsonschema = pytest.importorskip("jsonschema")

# A short form of the templates of Hermes and Qwen: tools, calls, results, and reasoning opened by an option.
TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}<assistant>
{% if think %}<think>
{% endif %}{# </think> #}"""
USER = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Köln", "Bonn"]}, "day": {"type": "integer", "minimum": 1,
          "maximum": 9}}, "required": ["city", "day"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
         {"type": "function", "function": {"name": "now"}}]  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "day": 3}}\n</tool_call>'
NOW = '<tool_call>{"name": "now"}</tool_call>'
SHORT = {"max_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InlineServer]:
    with mock.patch("tests.unit.serving.server.LENGTH", 2400):
        folder = make_folder(tmp_path_factory.mktemp("structured"))
    with inline(folder, {"threads": 1, "speculation": 3}, chat_template=TEMPLATE, reasoning_parser="none") as made:
        yield made


@pytest.fixture
def thinking(server: InlineServer) -> Iterator[InlineServer]:
    """The server with a parser of reasoning; without one, a random model does not begin to think."""
    form = ChatFormat(server.service.tokenizer, TEMPLATE, "auto", "auto")
    with mock.patch.object(server.service, "chat", form):
        yield server


@contextlib.contextmanager
def saying(server: InlineServer, *texts: str, constrained: bool = False) -> Iterator[None]:
    """The model says these texts, an answer each; with `constrained`, they are beginnings, and it goes on."""
    ends = [] if constrained else [2]
    waiting = [server.service.tokenizer(text, add_special_tokens=False)["input_ids"] + ends for text in texts]
    own = Sampler.next

    def scripted(self: Any, logits: Any) -> Any:
        if not hasattr(self, "script"):
            self.script = waiting.pop(0)
        if constrained and not self.script:
            return own(self, logits)
        token = self.script.pop(0)
        self.note(token)
        return token, None

    with mock.patch.object(Sampler, "next", scripted), mock.patch.object(Sampler, "plain", False):
        yield


def joined(answer: Any) -> dict[str, Any]:
    """Message of a streamed answer, joined as clients do, with its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for body in events(answer):
        if body == "[DONE]" or not body.get("choices"):
            assert body == "[DONE]", body
            continue
        delta = body["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(message["tool_calls"]) and part["id"].startswith("call_")
                message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
        message["reason"] = body["choices"][0]["finish_reason"]
    return message


def plain(answer: Any) -> dict[str, Any]:
    """The same of a whole answer."""
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", ""),
            "tool_calls": [call["function"] for call in calls], "reason": choice["finish_reason"]}  # fmt: skip


def both(server: InlineServer, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, which is the same in a stream."""
    whole = plain(server.post("chat/completions", {**SHORT, "seed": 3, **body}))
    assert joined(server.post("chat/completions", {**SHORT, "seed": 3, **body, "stream": True})) == whole
    return whole


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, None),
        ({"guided_json": SCHEMA}, None),
        ({"structured_outputs": {"regex": "[a-c]{3}é"}}, "[a-c]{3}é"),
        ({"guided_regex": "[a-c]{3}é"}, "[a-c]{3}é"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "a|b"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
    ],
)
def test_fields_of_both_endpoints(server: InlineServer, fields: dict[str, Any], pattern: str | None) -> None:
    chat = both(server, {"messages": USER, **fields})
    text = server.post("completions", {"prompt": "x", **SHORT, **fields}).json()["choices"][0]
    for said, reason in ((chat["content"], chat["reason"]), (text["text"], text["finish_reason"])):
        assert reason == "stop"
        if pattern is None:
            assert set(json.loads(said)) == {"city", "day"}
        else:
            assert re.fullmatch(pattern, said)


def test_json_objects_and_texts(server: InlineServer) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = server.post("completions", {"prompt": "x", "max_tokens": 4, **fields}).json()["choices"][0]
        assert answer["text"].startswith("{") and answer["finish_reason"] in ("length", "stop")
    body = {"messages": USER, "max_tokens": 3, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    assert server.post("chat/completions", body).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
         "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "z"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
          "tool_choice": "required"}, "parameters of 'f'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_status(server: InlineServer, fields: dict[str, Any], param: str, streamed: bool) -> None:
    answer = server.post("chat/completions", {"messages": USER, "stream": streamed, **fields})
    assert answer.status_code == 400 and param in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        ("named", None),
        pytest.param("required", None, marks=pytest.mark.slow),
        pytest.param("required", False, marks=pytest.mark.slow),
    ],
)
def test_forced_calls(server: InlineServer, choice: str, parallel: bool | None) -> None:
    """Stop strings do not cut the arguments."""
    named = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": USER, "tools": TOOLS[:1] if choice == "named" else TOOLS, "temperature": 1, "max_tokens": 600,
            "tool_choice": named if choice == "named" else choice, "parallel_tool_calls": parallel,
            "stop": ["B", "K", "day", "{"]}  # fmt: skip
    with mock.patch.object(tool_calls, "MOST_CALLS", 2):
        answer = both(server, body)
    most = 2 if choice == "required" and parallel is None else 1
    assert answer["reason"] == "tool_calls" and 1 <= len(answer["tool_calls"]) <= most
    assert not answer["content"].strip()
    for call in answer["tool_calls"]:
        assert set(json.loads(call["arguments"])) == ({"city", "day"} if call["name"] == "weather" else set())


@pytest.mark.parametrize("loops", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_loops_of_a_scripted_model(server: InlineServer, loops: int) -> None:
    """The official client: a call, its result, and an answer; streamed and whole ones are the same."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for number in range(loops):
        before = ("", "Let me look.\n")[number % 2]
        calls = CALL * (1 + number % 3)
        messages: list[Any] = list(USER)
        with saying(server, before + calls, f"It is {number} degrees <tool_call>"):
            options: dict[str, Any] = {"model": "tiny", "tools": TOOLS}
            if number % 2:
                stream = client.chat.completions.stream(messages=messages, **options)
                with stream as parts:
                    for _ in parts:
                        pass
                message = parts.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(messages=messages, **options).choices[0].message
            assert (message.content or "") == before.strip() and message.tool_calls is not None
            assert len(message.tool_calls) == 1 + number % 3
            messages.append(message.model_dump())
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"city": "Bonn", "day": 3}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(number)})
            last = client.chat.completions.create(messages=messages, **options).choices[0]
            assert last.message.content == f"It is {number} degrees <tool_call>" and last.finish_reason == "stop"


SLOW = pytest.mark.slow
SCRIPTED = [  # options, text of the model, (content, reasoning, number of calls, finish reason)
    ({"tools": TOOLS[1:]}, f"<think>{NOW}</think>Yes{NOW}", ("Yes", NOW, 1, "tool_calls")),
    ({"chat_template_kwargs": {"think": True}}, "h\n</think>\n\nY", ("\n\nY", "h\n", 0, "stop")),
    pytest.param({}, CALL, (CALL, "", 0, "stop"), marks=SLOW),
    pytest.param({"tools": TOOLS}, f"Yes. {CALL}{CALL}", ("Yes.", "", 2, "tool_calls"), marks=SLOW),
    pytest.param({"tools": TOOLS, "parallel_tool_calls": False}, CALL + CALL, ("", "", 1, "tool_calls"), marks=SLOW),
    pytest.param({"tools": TOOLS, "tool_choice": "none"}, CALL, (CALL, "", 0, "stop"), marks=SLOW),
    pytest.param({"tools": TOOLS}, CALL[:30], (CALL[:30], "", 0, "stop"), marks=SLOW),
    pytest.param({"chat_template_kwargs": {"think": True}}, "hm", ("", "hm", 0, "stop"), marks=SLOW),
    pytest.param({}, "Yes </think>", ("Yes </think>", "", 0, "stop"), marks=SLOW),
]


@pytest.mark.parametrize(("options", "text", "wanted"), SCRIPTED)
def test_calls_and_reasoning_of_a_scripted_model(
    thinking: InlineServer, options: dict[str, Any], text: str, wanted: tuple[Any, ...]
) -> None:
    with saying(thinking, text, text):
        got = both(thinking, {"messages": USER, **options})
    assert (got["content"], got["reasoning_content"], len(got["tool_calls"]), got["reason"]) == wanted


def test_a_constraint_begins_after_the_reasoning(thinking: InlineServer) -> None:
    options = {"messages": USER, "guided_choice": ["left", "right"]}
    for think, begun in ((True, "hm {}</think>"), (False, "<think>hm {}</think>"), (False, "r")):
        with saying(thinking, begun, begun, constrained=True):
            answer = both(thinking, {**options, "chat_template_kwargs": {"think": think}})
        assert answer["content"] in ("left", "right") and answer["reason"] == "stop"
        assert answer["reasoning_content"] == ("hm {}" if begun[1:] else "")
    body = {**options, "tools": TOOLS[:1], "tool_choice": "required", "chat_template_kwargs": {"think": True}}
    del body["guided_choice"]
    with saying(thinking, "hm</think>", "hm</think>", constrained=True), mock.patch.object(tool_calls, "MOST_CALLS", 2):
        answer = both(thinking, body)
    assert answer["reasoning_content"] == "hm" and answer["tool_calls"]


def test_a_slow_compile_does_not_stall_others(server: InlineServer) -> None:
    """And a request cancelled meanwhile leaves nothing."""
    compile_, entered, let_go = ConstraintCompiler._compile, threading.Event(), threading.Event()

    def slow(self: Any, structured: Any) -> Any:
        entered.set()
        assert let_go.wait(60)
        return compile_(self, structured)

    with mock.patch.object(ConstraintCompiler, "_compile", slow):
        answers: list[Any] = []
        body = {"messages": USER, "max_tokens": 9, "guided_regex": "slow[a-z]"}
        thread = threading.Thread(target=lambda: answers.append(server.post("chat/completions", body)))
        thread.start()
        assert entered.wait(60)
        assert server.post("completions", {"prompt": "x", "max_tokens": 5}).status_code == 200 and not answers
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", **body}, timeout=0.5)
        let_go.set()
        thread.join(60)
    assert re.fullmatch("slow[a-z]", plain(answers[0])["content"])
    server.until_free()


def test_compiles_of_cancelled_requests_are_left_out_and_results_are_kept_until_they_are_submitted() -> None:
    compiling, compiler, entered, let_go, ran = _Compiling(), ConstraintCompiler(None, None), [], threading.Event(), []

    def compile_(self: Any, one: StructuredOutput) -> Any:
        ran.append(one.value)
        if one.value == "slow":
            entered.append(1)
            assert let_go.wait(60)
        if one.value == "panic":
            raise SystemExit
        return object()

    def start(ident: int, text: str) -> None:
        one = StructuredOutput("regex", text)
        compiling.start(Submit(ident, [1], {"structured": one}), functools.partial(compiler.prepare, one))

    def finished(count: int) -> list[Any]:
        ready: list[Any] = []
        while len(ready) < count:
            assert compiling.news.poll(60)
            ready += compiling.finished()
        return ready

    with mock.patch.object(ConstraintCompiler, "_compile", compile_):
        for ident in range(3):  # the same one has one thread
            start(ident, "slow")
        for ident in range(3, 3 + 2 * REMEMBERED):
            start(ident, f"{ident}")
        ready = finished(2 * REMEMBERED)
        assert {message.ident for message, _ in ready} == set(range(3, 3 + 2 * REMEMBERED)) and len(entered) == 1
        ran.clear()
        for message, _ in ready:
            compiler.compile(message.sampling["structured"])
        assert not ran
        start(200, "panic")
        assert finished(1)[0][0].ident == 200
        compiling.cancel(0)
        let_go.set()
        assert {message.ident for message, _ in finished(2)} == {1, 2} and not compiling.waiting
        assert entered == [1]


def test_a_request_cancelled_while_it_waits_is_not_compiled() -> None:
    compiling, let_go, ran = _Compiling(), threading.Event(), []
    for ident in range(SLOTS):
        compiling.start(Submit(ident, [1], {}), lambda: let_go.wait(60))
    for ident in range(10, 14):
        compiling.start(Submit(ident, [1], {}), functools.partial(ran.append, ident))
    for ident in (10, 11, 13):
        assert compiling.cancel(ident)
    let_go.set()
    while compiling.waiting:
        assert compiling.news.poll(60)
        compiling.finished()
    assert ran == [12]


def test_templates_without_tools_get_them_as_text(server: InlineServer) -> None:
    from deepspeed.serving.protocol import APIError, ChatCompletionRequest

    words = server.service.tokenizer
    history = [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]},
               {"role": "tool", "content": "noon"}]  # fmt: skip
    request = ChatCompletionRequest.parse(json.dumps({"model": "m", "messages": history, "tools": TOOLS}).encode())
    own = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text = ChatFormat(words, own, "auto", "auto").text(request)
    assert text.startswith("<system>") and '"name": "weather"' in text and "<tool_response>\nnoon" in text
    assert '<assistant><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in text
    with pytest.raises(APIError, match="--tool-call-parser"):
        ChatFormat(words, f"{own}{{{{ tools }}}}", "auto", "auto").text(request)
    assert ChatFormat(words, f"{own}{{{{ tools }}}}", "pythonic", "auto").text(request)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_args", "pythonic"])
def test_calls_are_forced_in_every_format(server: InlineServer, name: str) -> None:
    service = server.service
    with mock.patch.object(service, "chat", ChatFormat(service.tokenizer, "{{ tools }}x", name, "none")):
        choice = {"type": "function", "function": {"name": "weather"}}
        body = {"messages": USER, "tools": TOOLS, "tool_choice": choice, "temperature": 1, "max_tokens": 300}
        answer = plain(server.post("chat/completions", body))
        assert answer["reason"] == "tool_calls" and not answer["content"], answer
        assert [set(json.loads(call["arguments"])) for call in answer["tool_calls"]] == [{"city", "day"}]


def test_a_mark_without_a_token_is_no_special_token(server: InlineServer) -> None:
    """A tokenizer gives its token for unknown ones, which may be special, for every mark that it lacks."""
    from deepspeed.serving.protocol import ChatCompletionRequest

    words = copy.deepcopy(server.service.tokenizer)
    words.unk_token = "<s>"
    assert words.convert_tokens_to_ids("<tool_call>") == words.bos_token_id
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": USER, "tools": TOOLS})
    form = ChatFormat(words, TEMPLATE, "auto", "auto")
    assert form.keep(request) == frozenset()
    words.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    assert form.keep(request) == {words.convert_tokens_to_ids("<tool_call>")}


@pytest.mark.slow
def test_fifty_loops_of_the_trained_model() -> None:
    """It has to call; results go back, and the last turn may call or not. Its template takes no tools."""
    from tests.trained import base

    folder = base()
    cities = ["Bonn", "Köln", "Łódź", "São Paulo", "東京"]
    with inline(folder, {"dtype": "bf16", "speculation": 3}) as server:
        for number in range(50):
            question = f"What is the weather in {cities[number % 5]} on day {number % 9 + 1}?"
            messages: list[Any] = [{"role": "user", "content": question}]
            schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
                      "day": {"type": "integer", "minimum": 1, "maximum": 31}}, "required": ["city"],
                      "additionalProperties": False}  # fmt: skip
            tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}, TOOLS[1]]
            forced = ("required", {"type": "function", "function": {"name": "weather"}})[number % 2]
            body = {"messages": messages, "tools": tools, "tool_choice": forced, "seed": number, "max_tokens": 120,
                    "temperature": (number % 3) / 2, "parallel_tool_calls": number % 4 == 0}  # fmt: skip
            whole = plain(server.post("chat/completions", body))
            if number % 5 == 0:
                assert joined(server.post("chat/completions", {**body, "stream": True})) == whole
            assert whole["tool_calls"] and (whole["reason"] == "tool_calls" or body["parallel_tool_calls"])
            complete = whole["tool_calls"] if whole["reason"] == "tool_calls" else whole["tool_calls"][:-1]
            for call in complete:
                arguments = json.loads(call["arguments"])
                if call["name"] == "weather":
                    jsonschema.validate(arguments, schema)
            calls = [{"id": f"call_{place}", "type": "function", "function": call} for place, call in
                     enumerate(complete)]  # fmt: skip
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "sunny, 20 degrees"} for call in calls]
            last = plain(server.post("chat/completions", {**body, "messages": messages, "tool_choice": "auto",
                                                          "max_tokens": 30}))  # fmt: skip
            assert all(isinstance(json.loads(call["arguments"]), dict) for call in last["tool_calls"])
