"""Calls of tools in the text of an answer: formats of the common chat templates, and their parsers."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from deepspeed.errors import RequestError
from deepspeed.inference.structured_output import WHITESPACE, check_schema
from deepspeed.serving.reasoning import partial_length

MOST_CALLS = 16  # calls of an answer that has to call: without a limit, it might never end
MOST_FAILED = 32  # texts of an answer that begin as a call and are none; each may be read up to the answer's end
_STRUCTURE = re.compile(r'\\.|["{}\[\]<]', re.DOTALL)  # "<" is in no JSON outside of strings, but begins marks


@dataclass(frozen=True)
class ToolFormat:
    """Text of calls: `head`, then calls with `separator` between them, then `tail`.

    A call is `begin`, the name, `middle`, the arguments as a JSON object, `end`.

    Attributes:
        marks: texts that begin calls anywhere in an answer; if empty, calls are the whole answer.
        specials: marks that may be special tokens of the model.
        read: parser of text from the first call on: (text, whether it is complete, state of the scan) to calls as
            (name, arguments) and the length of their text; None: more text is needed; no calls, or ValueError: there
            are none.
    """

    marks: tuple[str, ...]
    read: Callable[[str, bool, _CallScan], tuple[list[tuple[str, Any]], int] | None]
    begin: str
    middle: str
    end: str
    separator: str
    head: str = ""
    tail: str = ""
    specials: tuple[str, ...] = ()


def _loads(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse one JSON value from `start` on; returns it and its end, or raises ValueError."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.JSONDecoder(parse_constant=refuse).raw_decode(text, start)
    except RecursionError:
        raise ValueError("too deep") from None


def _call(value: Any) -> tuple[str, Any] | None:
    """Return (name, arguments) of a call as a JSON object; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments, end = _loads(arguments)
        except ValueError:
            return None
    return (value["name"], arguments) if isinstance(arguments, dict) else None


class _CallScan:
    """Scan for calls in a text that grows: no part is read twice, however many parts it arrives in.

    Attributes:
        place: number of characters read so far.
        begin: beginning of the last value.
        calls: calls read so far.
    """

    def __init__(self) -> None:
        self.place = self.begin = self.depth = 0
        self.quoted = False
        self.calls: list[tuple[str, Any]] = []

    def skip(self, text: str) -> bool:
        """Go on behind spaces; returns whether anything follows."""
        while self.place < len(text) and text[self.place].isspace():
            self.place += 1
        return self.place < len(text)

    def value(self, text: str) -> Any:
        """Return the object or list that begins here, None as long as its end is missing; raises ValueError."""
        if not self.depth:
            if text[self.place] not in "{[":
                raise ValueError("neither an object nor a list")
            self.begin = self.place
        for match in _STRUCTURE.finditer(text, self.place):
            mark, self.place = match[0], match.end()
            if mark == '"':
                self.quoted = not self.quoted
            elif self.quoted:
                continue
            elif mark in ("{", "["):
                self.depth += 1
            elif mark in ("}", "]"):
                self.depth -= 1
                if not self.depth:
                    value, end = _loads(text, self.begin)
                    if end != self.place:
                        raise ValueError("brackets do not fit")
                    return value
            else:
                raise ValueError(f"{mark!r} outside of a string")
        # A backslash at the end belongs to the next character.
        self.place = max(self.place, len(text) - text.endswith("\\"))
        return None


def _read_hermes(text: str, final: bool, scan: _CallScan) -> tuple[list[tuple[str, Any]], int] | None:
    opening, closing = "<tool_call>", "</tool_call>"
    scan.place = max(scan.place, len(opening))
    if not scan.calls:
        value = scan.value(text) if scan.depth or scan.skip(text) else None
        if value is None:
            return ([], 0) if final else None
        call = _call(value)
        if call is None:
            return [], 0
        scan.calls.append(call)
    scan.skip(text)
    end = scan.place + len(closing)
    rest = text[scan.place : end]
    if rest == closing:
        return scan.calls, end
    if not closing.startswith(rest):
        return [], 0
    return (scan.calls, len(text)) if final else None  # many models end without the closing mark


def _read_llama(text: str, final: bool, scan: _CallScan) -> tuple[list[tuple[str, Any]], int] | None:
    mark = "<|python_tag|>"
    if not scan.place and text.startswith(mark):
        scan.place = len(mark)
    while scan.depth or scan.skip(text):
        if not scan.depth and scan.calls and text[scan.place] == ";":
            scan.place += 1
            continue
        value = scan.value(text)
        if value is None:
            return ([], 0) if final else None
        call = _call(value)
        if call is None:
            return [], 0
        scan.calls.append(call)
    return (scan.calls, len(text)) if final else None


def _read_mistral(text: str, final: bool, scan: _CallScan) -> tuple[list[tuple[str, Any]], int] | None:
    mark, arguments_mark = "[TOOL_CALLS]", "[ARGS]"
    scan.place = max(scan.place, len(mark))
    if not scan.depth:
        if not scan.skip(text):
            return ([], 0) if final else None
        if text[len(mark) : scan.place].strip() or text[scan.place] not in "[{":
            brace = text.find("{", scan.place)  # of the arguments, after a name
            scan.place = len(text) if brace < 0 else brace
    value = scan.value(text) if scan.place < len(text) else None
    if value is None:
        return ([], 0) if final else None
    name = text[len(mark) : scan.begin].partition(arguments_mark)[0].strip()
    if name:
        return [(name, value)], scan.place
    calls = [_call(entry) for entry in (value if isinstance(value, list) else [value])]
    return ([], 0) if None in calls else ([call for call in calls if call is not None], scan.place)


def _read_pythonic(text: str, final: bool, _: _CallScan) -> tuple[list[tuple[str, Any]], int] | None:
    if not final:
        return None
    # JSON's literals are names in Python
    names = {"true": True, "false": False, "null": None}

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            return [value(entry) for entry in node.elts]
        if isinstance(node, ast.Dict):
            return {
                str(ast.literal_eval(key)): value(entry)
                for key, entry in zip(node.keys, node.values, strict=True)
                if key
            }
        return ast.literal_eval(node)

    try:
        body = ast.parse(text.strip(), mode="eval").body
        nodes = body.elts if isinstance(body, ast.List) else []
        calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
                return [], 0
            calls.append((ast.unparse(node.func), {str(word.arg): value(word.value) for word in node.keywords}))
        return calls, len(text) if calls else 0
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return [], 0


_JSON_CALL = {"begin": '{"name": "', "end": "}"}
# by names of --tool-call-parser: vLLM's, and `mistral_args`
TOOL_FORMATS = {
    "hermes": ToolFormat(
        ("<tool_call>",), _read_hermes, '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n",
        specials=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": ToolFormat(
        (), _read_llama, middle='", "parameters": ', separator="; ", specials=("<|python_tag|>",), **_JSON_CALL
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",), _read_mistral, middle='", "arguments": ', separator=", ", head="[TOOL_CALLS][", tail="]",
        specials=("[TOOL_CALLS]", "[ARGS]"), **_JSON_CALL,
    ),
    "mistral_args": ToolFormat(
        ("[TOOL_CALLS]",), _read_mistral, "[TOOL_CALLS]", "[ARGS]", "", "", specials=("[TOOL_CALLS]", "[ARGS]")
    ),
    "pythonic": ToolFormat((), _read_pythonic, "", "(", ")", ", ", head="[", tail="]"),
}  # fmt: skip
_BEGINNINGS = {"llama3_json": ("{", "<|python_tag|>"), "pythonic": ("[",)}  # of answers that are calls as a whole


def tool_format(template: str) -> str:
    """Return the name of the format that a chat template states; "" if it is none of `TOOL_FORMATS`."""
    if "<function=" in template:  # XML in the marks of Hermes
        return ""
    for mark, name in (("[ARGS]", "mistral_args"), ("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"),
                       ("func_name1(", "pythonic"), ("<|python_tag|>", "llama3_json"),
                       ('"parameters": ', "llama3_json")):  # fmt: skip
        if mark in template:
            return name
    return ""


@dataclass
class Delta:
    """New parts of an answer.

    Attributes:
        content, reasoning: new text of each.
        calls: parts of calls in OpenAI's form of deltas.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class CallParser:
    """Parser of the calls in an answer, whose text may arrive in any parts.

    Args:
        name: name of the format.
        tools: names of the tools.
    """

    def __init__(self, name: str, tools: Collection[str]) -> None:
        self._form, self._tools = TOOL_FORMATS[name], tools
        self._held, self._count = "", 0  # text that is not written yet, and number of calls

    @property
    def called(self) -> bool:
        """Whether there is a call so far."""
        return self._count > 0

    def push(self, text: str, final: bool = False) -> Delta:
        """Return what the new `text` adds; a possible part of a call is held back unless `final`."""
        self._held += text
        delta = Delta()
        while self._held and self._step(delta, final):
            pass
        if final:
            self._finish(delta)
        return delta

    def _step(self, delta: Delta, final: bool) -> bool:
        """Write a part of the held text, which is not empty; returns False if it has to wait."""
        raise NotImplementedError

    def _finish(self, delta: Delta) -> None:
        """Write what is left at the end of the answer."""
        raise NotImplementedError

    def _begin_call(self, delta: Delta, name: str) -> None:
        self._count += 1
        call = {"name": name, "arguments": ""}
        ident = f"call_{uuid.uuid4().hex[:24]}"
        delta.calls.append({"index": self._count - 1, "id": ident, "type": "function", "function": call})

    def _add_arguments(self, delta: Delta, text: str) -> None:
        delta.calls.append({"index": self._count - 1, "function": {"arguments": text}})


def _dumped(arguments: Any) -> str:
    """Write arguments as JSON; raises ValueError, TypeError or RecursionError if they are none."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        text = json.dumps(arguments)
    return text


class ToolCallParser(CallParser):
    """Parser of an answer that may call tools.

    A call is written once it is complete. Text that looks like a call but has no JSON arguments or an unknown name
    stays content. Spaces around calls are left out at the beginning and at the end of the content.

    Args:
        name: name of the format.
        tools: names of the tools.
        most: maximum number of calls, later ones are left out; None: any number.
    """

    def __init__(self, name: str, tools: Collection[str], most: int | None = None) -> None:
        super().__init__(name, tools)
        self._most, self._beginnings = most, _BEGINNINGS.get(name, ())
        self._scan, self._failed = _CallScan(), 0  # state of the held text, and number of texts that are no calls
        self._spaces = ""
        self._plain = False  # whether no calls follow
        self._written = self._after_call = (
            False  # whether there is content, and whether a call is the last before spaces
        )

    def _step(self, delta: Delta, final: bool) -> bool:
        length = self._before_call(final)
        if not length:
            return self._take_call(delta, final)
        self._write(delta, length)
        return True

    def _finish(self, delta: Delta) -> None:
        delta.content += "" if self._after_call else self._spaces

    def _before_call(self, final: bool) -> int:
        """Return the length of content before what may be a call."""
        text = self._held
        if self._plain:
            return len(text)
        if self._form.marks:
            places = [place for place in (text.find(mark) for mark in self._form.marks) if place >= 0]
            if places:
                return min(places)
            return len(text) - (0 if final else max(partial_length(text, mark) for mark in self._form.marks))
        begun = text.lstrip()
        starts = any(begun.startswith(mark) for mark in self._beginnings)
        waits = not final and (not begun or any(mark.startswith(begun) for mark in self._beginnings))
        if starts or waits:
            return len(text) - len(begun)
        self._plain = True
        return len(text)

    def _take_call(self, delta: Delta, final: bool) -> bool:
        """Read the calls at the beginning of the held text, or make it content; returns False if it has to wait."""
        if not any(self._held.startswith(mark) for mark in self._form.marks or self._beginnings):
            return False  # a part of a mark
        try:
            read = self._form.read(self._held, final, self._scan)
            if read is None:
                return False
            calls, length = [(name, _dumped(arguments)) for name, arguments in read[0]], read[1]
        except (ValueError, TypeError, RecursionError):  # no JSON, such as a set, or a number without end
            calls, length = [], 0
        if not calls or any(name not in self._tools for name, _ in calls):
            self._failed += 1
            self._plain = not self._form.marks or self._failed >= MOST_FAILED
            marks = [len(mark) for mark in self._form.marks if self._held.startswith(mark)]
            self._write(delta, max(marks, default=len(self._held)))
            return True
        for name, arguments in calls:
            if self._most is None or self._count < self._most:
                self._begin_call(delta, name)
                self._add_arguments(delta, arguments)
        self._held, self._after_call, self._scan = self._held[length:], True, _CallScan()
        return True

    def _write(self, delta: Delta, length: int) -> None:
        """Move the first characters of the held text to the content, except for spaces around calls."""
        text, self._held, self._scan = self._spaces + self._held[:length], self._held[length:], _CallScan()
        text = text.lstrip() if self.called and not self._written else text
        content = text.rstrip()
        self._spaces = text[len(content) :]
        if content:
            self._written, self._after_call = True, False
        delta.content += content


class ForcedCallParser(CallParser):
    """Parser of an answer that is calls by its constraint (`forced_calls`); arguments are written as they arrive, after
    the name is complete."""

    def __init__(self, name: str, tools: Collection[str]) -> None:
        super().__init__(name, tools)
        self._openings = {tool: f"{self._form.begin}{tool}{self._form.middle}" for tool in tools}
        self._depth = 0
        self._quoted = self._escaped = self._inside = False

    def _step(self, delta: Delta, final: bool) -> bool:
        if not self._inside and not self._begin(delta):
            return False
        if length := self._scan():
            self._add_arguments(delta, self._held[:length])
        self._held = self._held[length:]
        return True

    def _finish(self, delta: Delta) -> None:
        if not self.called:
            delta.content += self._held  # ended before the name

    def _begin(self, delta: Delta) -> bool:
        """Look for the next call; returns whether it has begun."""
        places = [(self._held.find(opening), tool) for tool, opening in self._openings.items()]
        place, tool = min(((place, tool) for place, tool in places if place >= 0), default=(-1, ""))
        if place < 0:
            return False
        self._held, self._inside = self._held[place + len(self._openings[tool]) :], True
        self._begin_call(delta, tool)
        return True

    def _scan(self) -> int:
        """Return the number of characters of the held text that belong to the arguments."""
        for place, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._inside = self._depth > 1
                if not self._inside:  # at depth 0, the arguments were no object, and this is behind them
                    end, self._depth = place + self._depth, 0
                    return end
                self._depth -= 1
        return len(self._held)


def forced_calls(name: str, tools: dict[str, dict[str, Any]], several: bool, literal: Callable[[str], str]) -> str:
    """Return the grammar, in Lark, of an answer that calls one or `several` of the tools.

    Args:
        name: name of the format.
        tools: JSON schema of the arguments, by name.
        several: whether up to `MOST_CALLS` calls are allowed.
        literal: function that writes a text in Lark, with its special tokens.

    Raises:
        RequestError: the arguments of a tool are no object, or their schema is too large; the message begins with
            "tools".
    """
    form = TOOL_FORMATS[name]
    lines = []
    for number, (tool, schema) in enumerate(tools.items()):
        begin, end = literal(f"{form.begin}{tool}{form.middle}"), literal(form.end)
        lines.append(f"call_{number}: {begin} arguments_{number} {end}")
        if schema.get("type", "object") != "object":
            raise RequestError(f"tools: parameters of {tool!r} have the type object, not {schema['type']!r:.80}")
        try:
            check_schema(schema)
        except ValueError as error:
            raise RequestError(f"tools: parameters of {tool!r}: {error}") from None
        schema = {"type": "object", **schema}
        if name == "pythonic":
            lines += _keywords(tool, number, schema)
        else:
            lines.append(f"arguments_{number}: {_json(schema)}")
    more = f"(({literal(form.separator)} call){{0,{MOST_CALLS - 1}}})" if several else ""
    if several and not form.separator:
        more = f"(call{{0,{MOST_CALLS - 1}}})"
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"start: {literal(form.head)} call {more} {literal(form.tail)}", f"call: {calls}", *lines])


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(schema)}"


def _keywords(tool: str, number: int, schema: dict[str, Any]) -> list[str]:
    """Return rules for arguments in Python's form: required ones in order, then any of the others."""
    properties, needed = schema.get("properties") or {}, schema.get("required") or []
    for name, value, kind in (("properties", properties, dict), ("required", needed, list)):
        if not isinstance(value, kind):
            wanted = "an object" if kind is dict else "a list"
            raise RequestError(f"tools: {name} of {tool!r} are {wanted}, not {value!r:.80}")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    lines, names = [], {key: f"value_{number}_{place}" for place, key in enumerate(properties)}
    for key, rule in names.items():
        part = properties[key]
        lines.append(f"{rule}: {json.dumps(key + '=')} {rule}_json")
        lines.append(f"{rule}_json: {_json({**part, **shared} if isinstance(part, dict) else part)}")
    required = [names[key] for key in properties if key in needed]
    optional = [rule for key, rule in names.items() if rule not in required]
    if required:
        texts = [' ", " '.join(required) + "".join(f' (", " {rule})?' for rule in optional)]
    else:
        texts = [rule + "".join(f' (", " {later})?' for later in optional[place + 1 :])
                 for place, rule in enumerate(optional)] + ['""']  # fmt: skip
    return [f"arguments_{number}: {' | '.join(texts)}", *lines]
