"""Form of a model's chats: prompts by its template, and what is split off its answers (reasoning, calls of tools)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from deepspeed.errors import RequestError
from deepspeed.inference.structured_output import StructuredOutput
from deepspeed.serving.embeddings import TokenizeRequest
from deepspeed.serving.protocol import APIError, ChatCompletionRequest, CompletionRequest
from deepspeed.serving.reasoning import ReasoningSplitter, reasoning_format
from deepspeed.serving.tool_calls import (
    TOOL_FORMATS,
    Delta,
    ForcedCallParser,
    ToolCallParser,
    forced_calls,
    tool_format,
)

# Instructions of Hermes, for templates that take no tools.
_INSTRUCTIONS = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_TAIL = 24  # tokens of the prompt that may hold a mark at its end


class AnswerParser:
    """Parser of one answer of a chat: reasoning first, then calls of tools or content.

    Args:
        splitter: splitter of the reasoning; None: there is none.
        calls: parser of calls; None: there are none.
    """

    def __init__(self, splitter: ReasoningSplitter | None, calls: ToolCallParser | ForcedCallParser | None) -> None:
        self._splitter, self._calls = splitter, calls

    @property
    def called(self) -> bool:
        """Whether there is a call so far."""
        return self._calls is not None and self._calls.called

    def push(self, text: str, final: bool) -> Delta:
        """Return what the new `text` adds to the answer; `final`: it is the last."""
        reasoning, rest = ("", text) if self._splitter is None else self._splitter.push(text, final)
        delta = Delta(rest) if self._calls is None else self._calls.push(rest, final)
        delta.reasoning = reasoning
        return delta


class ChatFormat:
    """Chat template of a model, with the formats of its reasoning and of its calls of tools.

    Args:
        tokenizer: the model's tokenizer.
        template: text of a template that replaces the tokenizer's own; "": none.
        tool_parser: name of the format of calls, or "auto": found by the template.
        reasoning_parser: name of the format of reasoning, "none", or "auto": found by the template.
    """

    def __init__(self, tokenizer: Any, template: str, tool_parser: str, reasoning_parser: str) -> None:
        self._tokenizer, self._template = tokenizer, template
        own = getattr(tokenizer, "chat_template", None) or ""
        self._text = template or (own if isinstance(own, str) else " ".join(map(str, own.values())))
        self._takes_tools = "tools" in self._text
        self._tools: Any = "hermes"  # as `_INSTRUCTIONS` say
        if self._takes_tools:
            self._tools = tool_format(self._text) if tool_parser == "auto" else tool_parser
        self._reasoning = reasoning_format(reasoning_parser, self._text)

    def keep(self, request: Any) -> frozenset[int]:
        """Return the special tokens that belong to the text of the answers to a request: marks of calls, reasoning."""
        marks: list[str] = []
        if isinstance(request, ChatCompletionRequest):
            marks += [] if self._reasoning is None else [self._reasoning.opening, self._reasoning.closing]
            marks += TOOL_FORMATS[self._tools].specials if request.callable_tools() and self._tools else []
        tokens = (self._special(mark) for mark in marks)
        return frozenset(token for token in tokens if token is not None)

    def _special(self, mark: str) -> int | None:
        """Return the special token of a mark; None if it is text."""
        try:
            token = self._tokenizer.convert_tokens_to_ids(mark)
            if self._tokenizer.convert_ids_to_tokens(token) != mark:  # the token of what is unknown
                return None
            return token if token in getattr(self._tokenizer, "all_special_ids", ()) or self._added(token) else None
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def _added(self, token: Any) -> bool:
        entry = getattr(self._tokenizer, "added_tokens_decoder", {}).get(token)
        return entry is not None and entry.special and token != getattr(self._tokenizer, "unk_token_id", None)

    def _literal(self, text: str) -> str:
        """Write a text in Lark; marks that are special tokens are written by number."""
        for mark in sorted({mark for form in TOOL_FORMATS.values() for mark in form.specials}, key=len, reverse=True):
            token = self._special(mark) if mark in text else None
            if token is not None:
                before, _, after = text.partition(mark)
                return " ".join(part for part in (self._literal(before), f"<[{token}]>", self._literal(after)) if part)
        return json.dumps(text, ensure_ascii=False) if text else ""

    # -- prompts --------------------------------------------------------------------------------------------------

    def text(self, request: ChatCompletionRequest | TokenizeRequest, generates: bool = True) -> str:
        """Return the prompt, with `generates` up to where the answer begins.

        Raises:
            APIError: status 400: there is no template, or it refuses the messages or the tools.
        """
        if not self._text:
            text = "this model has no chat template: start ds_serve with --chat-template, or use /v1/completions"
            raise APIError(400, f"messages: {text}", "messages", "no_chat_template")
        messages = [message.plain() for message in request.messages or ()]
        tools = [tool.plain() for tool in request.callable_tools()]
        if tools and not self._tools:
            text = "the chat template's form of calls is unknown: start ds_serve with --tool-call-parser"
            raise APIError(400, f"tools: {text}", "tools", "unsupported_parameter")
        options = {**(request.chat_template_kwargs or {}), "add_generation_prompt": generates}
        if tools and self._takes_tools:
            options["tools"] = tools
        elif tools:
            messages = _described(messages, tools)
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template or None,
                tokenize=False,
                **options,
            )
        except Exception as error:  # templates may raise Jinja errors or any others
            raise APIError(
                400, f"messages: the chat template refuses them: {error}", "messages", "invalid_value"
            ) from None

    # -- answers --------------------------------------------------------------------------------------------------

    def _opened(self, prompt: list[int]) -> bool:
        """Whether a prompt ends with the mark that opens reasoning."""
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        return self._reasoning is not None and tail.rstrip().endswith(self._reasoning.opening)

    def structured(self, request: CompletionRequest | ChatCompletionRequest, prompt: list[int]) -> Any:
        """Return the constraint on the answers to a request after `prompt`; None: any text.

        Raises:
            APIError: status 400: an invalid constraint, one together with a forced call, or parameters of a tool that
                cannot be enforced.
        """
        structured = request.constraint()
        if not isinstance(request, ChatCompletionRequest):
            return structured
        forced = request.forced_tools()
        try:
            if forced and structured is not None:
                raise RequestError(f"{structured.field}: not together with a tool_choice that forces a call")
            if forced:
                several = request.tool_choice == "required" and request.parallel_tool_calls is not False
                grammar = forced_calls(self._tools, forced, several, self._literal)
                structured = StructuredOutput("grammar", grammar, field="tools")
            if structured is not None and self._reasoning is not None:
                structured = replace(structured, lead=self._lead(self._opened(prompt)))
        except RequestError as error:
            raise APIError(400, str(error), str(error).partition(":")[0], "invalid_value") from None
        return structured

    def _lead(self, opened: bool) -> str:
        """Return the rules, in Lark, of reasoning before a constrained text, which begins right after the mark."""
        form: Any = self._reasoning
        opening, closing = (self._literal_mark(mark) for mark in (form.opening, form.closing))
        if closing.startswith("<["):
            inside = f"inside: /(?s:.*)/ {closing}"
        else:
            inside = f"inside[lazy]: /(?s:.*){_escaped(form.closing)}/"
        whole = "inside" if opened else f"{opening}? inside" if form.always else f"({opening} inside)?"
        return f"lead: {whole}\n{inside}"

    def _literal_mark(self, mark: str) -> str:
        token = self._special(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def parser(self, request: Any, prompt: list[int]) -> AnswerParser | None:
        """Return the parser of one answer after `prompt`; None if answers are text as it is."""
        if not isinstance(request, ChatCompletionRequest):
            return None
        names = [tool.function.name for tool in request.callable_tools()]
        splitter = None if self._reasoning is None else ReasoningSplitter(self._reasoning, self._opened(prompt))
        calls = None
        if request.forced_tools() and self._tools != "pythonic":
            calls = ForcedCallParser(self._tools, names)
        elif names and request.constraint() is None:
            most = 1 if request.parallel_tool_calls is False else None
            calls = ToolCallParser(self._tools, names, most)
        return None if splitter is None and calls is None else AnswerParser(splitter, calls)


def _escaped(text: str) -> str:
    """Write a text as a part of a regular expression in Lark."""
    return re.escape(text).replace("/", "\\/")


def _described(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the tools, their calls and their results are text, for templates that take no tools."""
    instructions = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    written = []
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
        elif message.get("tool_calls"):
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            parts = [text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
            message = {"role": "assistant", "content": "\n".join(part for part in parts if part)}
        written.append(message)
    if written[0]["role"] == "system":
        written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{instructions}"}
    else:
        written.insert(0, {"role": "system", "content": instructions})
    return written
