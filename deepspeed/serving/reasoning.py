"""Reasoning of a model, split off the rest of its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks around a model's reasoning.

    Attributes:
        opening, closing: the marks.
        always: whether an answer begins with reasoning even if neither it nor the prompt has the opening mark.
    """

    opening: str
    closing: str
    always: bool = False


_THINK = ReasoningFormat("<think>", "</think>")
# by names of --reasoning-parser, which are vLLM's
REASONING_FORMATS = {
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format of a model's reasoning; None if it has none.

    Args:
        name: a key of `REASONING_FORMATS`, "none", or "auto": found by the marks in the chat template.
        template: text of the chat template.
    """
    if name != "auto":
        return REASONING_FORMATS.get(name)
    return next((form for form in (_THINK, REASONING_FORMATS["mistral"]) if form.closing in template), None)


def partial_length(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark` but is not all of it."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


class ReasoningSplitter:
    """Splitter of one answer's text, which may arrive in any parts.

    Reasoning, the marks and the rest join to the text. Whatever is before the opening mark is not reasoning; if that is
    more than spaces, there is no reasoning at all.

    Args:
        form: the marks.
        opened: whether the prompt ends with the opening mark.
    """

    def __init__(self, form: ReasoningFormat, opened: bool) -> None:
        self._form = form
        self._state = "inside" if opened or form.always else "before"
        self._fresh = form.always and not opened  # the opening mark may come first all the same
        self._held = ""

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """Return (reasoning, rest) that the new `text` adds; a possible part of a mark is held back unless `final`."""
        self._held += text
        before = self._open(final) if self._state == "before" or self._fresh else ""
        if self._state == "before" or self._fresh:
            return "", before
        if self._state == "after":
            rest, self._held = self._held, ""
            return "", before + rest
        inside, closing, rest = self._held.partition(self._form.closing)
        if closing:
            self._state, self._held = "after", ""
            return inside, before + rest
        partial = 0 if final else partial_length(inside, self._form.closing)
        self._held = inside[len(inside) - partial :]
        return inside[: len(inside) - partial], before

    def _open(self, final: bool) -> str:
        """Look for the opening mark at the beginning; returns text before it that is no reasoning."""
        mark, begun = self._form.opening, self._held.lstrip()
        if begun.startswith(mark):
            spaces = self._held[: len(self._held) - len(begun)]
            self._state, self._fresh, self._held = "inside", False, begun[len(mark) :]
            return spaces
        if mark.startswith(begun) and not final:
            return ""
        if self._fresh:
            self._fresh = False
        else:
            self._state = "after"
        return ""
