"""Calls of tools and reasoning in texts: formats, malformed calls, and texts cut anywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from deepspeed.errors import RequestError
from deepspeed.inference.structured_output import LARGEST
from deepspeed.serving import tool_calls
from deepspeed.serving.chat_format import AnswerParser
from deepspeed.serving.reasoning import REASONING_FORMATS, ReasoningSplitter, reasoning_format
from deepspeed.serving.tool_calls import ForcedCallParser, ToolCallParser, forced_calls, tool_format

TOOLS = ("get_weather", "add")
WEATHER, ADD = ("get_weather", {"city": 'Köln </tool_call> "x"', "days": [1, 2]}), ("add", {"a": 1, "b": None})
HERMES = "<tool_call>\n" + json.dumps({"name": WEATHER[0], "arguments": WEATHER[1]}) + "\n</tool_call>"
HERMES_ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": null}}</tool_call>'
LLAMA = json.dumps({"name": "add", "parameters": ADD[1]})
MISTRAL = "[TOOL_CALLS][" + json.dumps({"name": WEATHER[0], "arguments": WEATHER[1]}) + ", " + LLAMA + "]"
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [  # format, text, content, calls
    ("hermes", HERMES, "", [WEATHER]),
    ("hermes", f"I look.\n{HERMES}\n{HERMES_ADD}\n", "I look.", [WEATHER, ADD]),
    ("hermes", HERMES_ADD.removesuffix("</tool_call>"), "", [ADD]),
    ("hermes", f"a {HERMES_ADD} b", "a  b", [ADD]),
    ("hermes", "plain <tool text\n", "plain <tool text\n", []),
    ("hermes", "<tool_call>{'name': add}</tool_call>", "<tool_call>{'name': add}</tool_call>", []),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
     '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
     '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\\\"}}</tool_call>', "", [("add", {"a": "\\"})]),
    ("hermes", f'<tool_call>{{"a": "{HERMES_ADD}', '<tool_call>{"a": "', [ADD]),
    ("hermes", f"<tool_call>broken</tool_call>{HERMES_ADD}", "<tool_call>broken</tool_call>", [ADD]),
    ("hermes", HERMES[:40], HERMES[:40], []),
    ("llama3_json", LLAMA, "", [ADD]),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [ADD, ADD]),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", f"It is {LLAMA}", f"It is {LLAMA}", []),
    ("llama3_json", LLAMA[:-4], LLAMA[:-4], []),
    ("mistral", MISTRAL, "", [WEATHER, ADD]),
    ("mistral", f"Yes.{MISTRAL}", "Yes.", [WEATHER, ADD]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": null}[TOOL_CALLS]add{"a": 1, "b": null}', "", [ADD, ADD]),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ("mistral", '[TOOL_CALLS][{"name": "add"}]]', "]", [("add", {})]),
    ("pythonic", '[add(a=1, b=None), get_weather(city="Köln </tool_call> \\"x\\"", days=[1, 2])]', "", [ADD, WEATHER]),
    ("pythonic", "[add(a=1, b=null)]", "", [ADD]),
    ("pythonic", "[add(1)]", "[add(1)]", []),
    *(("pythonic", f"[add(a={value})]", f"[add(a={value})]", []) for value in ("{1, 2}", 'b"x"', "1j", "...", "1e999")),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[x](http://y) is a link", "[x](http://y) is a link", []),
    ("pythonic", "no", "no", []),
]  # fmt: skip


def parts(text: str, seed: int) -> list[str]:
    """The text in one part (seed 0), in single characters (1), or cut anywhere."""
    if seed < 2:
        return [text] if seed == 0 else list(text)
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(len(text) + 1), min(6, len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(parser: Any, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls as (name, arguments)) as a client joins them."""
    reasoning, content, calls = "", "", []
    for number, piece in enumerate(pieces):
        delta = parser.push(piece, number == len(pieces) - 1)
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for part in delta.calls:
            if "id" in part:
                assert part["type"] == "function" and part["id"].startswith("call_") and part["index"] == len(calls)
                calls.append((part["function"]["name"], ""))
            assert part["index"] == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part["function"]["arguments"])
    return reasoning, content, calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read_however_a_text_is_cut(name: str, text: str, content: str, calls: list[Any]) -> None:
    for seed in range(12):
        parser = ToolCallParser(name, TOOLS)
        _, got, found = read(parser, parts(text, seed))
        assert (got, [(tool, json.loads(arguments)) for tool, arguments in found]) == (content, calls), (seed, text)
        assert parser.called == bool(calls)


@pytest.mark.parametrize(
    ("name", "begin", "part"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": "', "word "),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": "', "</tool_call>"),
        ("hermes", "", "<tool_call>"),
        ("hermes", "", '<tool_call>{"a": "\\\\"'),
        ("hermes", '<tool_call>{"a": ["', "<tool_call>{ "),
        ("llama3_json", '{"name": "add", "parameters": {"a": "', "word "),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": "', "word "),
        ("mistral", "", "[TOOL_CALLS]"),
    ],
)
def test_the_work_grows_with_the_text(name: str, begin: str, part: str) -> None:
    """Characters that the scan passes and that JSON parses, not times, are what is counted."""
    work, loads, structure = [0], tool_calls._loads, tool_calls._STRUCTURE

    class Counted:
        @staticmethod
        def finditer(text: str, place: int) -> Iterator[Any]:
            for found in structure.finditer(text, place):
                work[0] += 1
                yield found
            work[0] += len(text) - place

    def counted(text: str, start: int = 0) -> Any:
        work[0] += len(text) - start
        return loads(text, start)

    with mock.patch.object(tool_calls, "_STRUCTURE", Counted), mock.patch.object(tool_calls, "_loads", counted):
        for streamed in (True, False):
            costs = []
            for count in (1000, 2000):
                work[0], parser = 0, ToolCallParser(name, TOOLS)
                pieces = [begin, *[part] * count, '"}}]']
                read(parser, pieces if streamed else ["".join(pieces)])
                costs.append(work[0])
            assert costs[1] <= 2.5 * costs[0] + 1000 and costs[1] <= 80 * len("".join(pieces)), (streamed, costs)


def test_arguments_that_are_no_object_end_where_they_end() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": "hi"}\n</tool_call>\n'
    for seed in range(12):
        found = read(ForcedCallParser("hermes", TOOLS), parts(text * 2, seed))[2]
        assert found == [("add", '"hi"')] * 2


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_parameters_that_no_call_can_have_are_refused_by_name(name: str) -> None:
    wrong: list[Any] = [{"type": "string"}, {"type": ["object", "null"]}]
    wrong.append({"properties": {f"p{n}": {} for n in range(LARGEST + 1)}})
    wrong += [{"properties": ["a"]}, {"required": 1}] if name == "pythonic" else []
    for schema in wrong:
        with pytest.raises(RequestError, match="^tools: .*'add'"):
            forced_calls(name, {"add": schema}, True, json.dumps)
    assert forced_calls(name, {"add": {"properties": {"a": {"type": "string"}}}}, True, json.dumps)


def test_without_parallel_calls_there_is_one() -> None:
    assert len(read(ToolCallParser("hermes", TOOLS, most=1), [HERMES + HERMES_ADD])[2]) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": "}\\"{", "b": [{}]}}\n</tool_call>\n'
         '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {"a": "}\\"{", "b": [{}]}}; {"name": "get_weather", '
         '"parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": "}\\"{", "b": [{}]}}, {"name": "get_weather", '
         '"arguments": {}}]'),
        ("mistral_args", '[TOOL_CALLS]add[ARGS]{"a": "}\\"{", "b": [{}]}[TOOL_CALLS]get_weather[ARGS]{}'),
    ],
)  # fmt: skip
def test_forced_calls_arrive_with_their_text(name: str, text: str) -> None:
    wanted = [("add", '{"a": "}\\"{", "b": [{}]}'), ("get_weather", "{}")]
    for seed in range(12):
        assert read(ForcedCallParser(name, TOOLS), parts(text, seed)) == ("", "", wanted)
    early = [ForcedCallParser(name, TOOLS).push(text[:place]) for place in range(len(text))]
    assert any(0 < sum(len(part["function"]["arguments"]) for part in one.calls) < 10 for one in early)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_and_content_join_to_the_text(name: str, opened: bool) -> None:
    form = REASONING_FORMATS[name]
    inside, after = "\nhm < </thi [/T\n", "\n\nYes.</think>"
    for text, reasoning, content in (
        (f"{form.opening}{inside}{form.closing}{after}", inside, after),
        (f"{inside}{form.closing}{after}", inside, after) if opened or form.always else ("So.", "", "So."),
        (f"{form.opening}{inside}", inside, ""),
    ):
        if opened:
            text = text.removeprefix(form.opening)
        reasoning, content = (text, "") if opened and text == "So." else (reasoning, content)
        for seed in range(12):
            parser = AnswerParser(ReasoningSplitter(form, opened), None)
            assert read(parser, parts(text, seed))[:2] == (reasoning, content), (seed, text)
    answer = AnswerParser(ReasoningSplitter(form, True), ToolCallParser("hermes", TOOLS))
    thought = f"{HERMES_ADD}{form.closing}\n{HERMES_ADD}"
    assert read(answer, list(thought)) == (HERMES_ADD, "", [("add", '{"a": 1, "b": null}')])


def test_formats_are_found_by_the_template() -> None:
    for text, wanted in (
        ("{{ tools }}<tool_call>", "hermes"), ("[TOOL_CALLS]{{ x }}[ARGS]", "mistral_args"),
        ("[TOOL_CALLS] [", "mistral"),
        ("<|python_tag|>", "llama3_json"), ("[func_name1(params_name1=", "pythonic"),
        ("<tool_call><function=", ""), ("", ""),
    ):  # fmt: skip
        assert tool_format(text) == wanted
    assert reasoning_format("auto", "x </think>") == REASONING_FORMATS["qwen3"]
    assert reasoning_format("auto", "{{ m.content }}") is None and reasoning_format("none", "</think>") is None
