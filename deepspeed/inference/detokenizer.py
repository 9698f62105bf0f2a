"""Decodes tokens to text as they come, and finds stop strings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

_HELD = 32  # tokens that give no certain text, after which they are looked at again
_CHARACTER = 4  # bytes of the longest character; a token has at least one
_HALF = "\ufffd"


class Detokenizer:
    """Text of one sequence.

    Args:
        decode: tokens to text.
        before: tokens in front of the first new one; they decide whether it begins with a space.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens: list[int] = list(before)
        self._begun, self._shown = 0, len(self._tokens)  # tokens decoded as context, and up to which text was given

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """New text that is certain after these tokens.

        Args:
            tokens: new ones.
            final: nothing follows: half a character is given too.
        """
        self._tokens += tokens
        given = self._new(len(self._tokens), final)
        if not given and len(self._tokens) - self._shown > _HELD:
            given = self._pass_over()
        return given

    def _new(self, end: int, final: bool) -> str:
        """Decoded behind a few tokens before it, since tokenizers treat the first one of a text specially."""
        before = self._decode(self._tokens[self._begun : self._shown])
        whole = self._decode(self._tokens[self._begun : end])
        if len(whole) <= len(before) or (whole.endswith(_HALF) and not final):
            return ""
        self._begun, self._shown = self._shown, end
        self._tokens, self._begun, self._shown = self._tokens[self._begun :], 0, end - self._begun
        return whole[len(before) :]

    def _pass_over(self) -> str:
        """Tokens that gave nothing for so long will give nothing more, or are no characters: else each new token would
        decode all of them again."""
        for end in range(len(self._tokens) - 1, len(self._tokens) - _CHARACTER, -1):
            if given := self._new(end, final=False):
                return given
        if given := self._new(len(self._tokens) - _CHARACTER, final=True):
            return given
        del self._tokens[self._shown :]
        return ""


class StopStrings:
    """Watches one request's text.

    Args:
        tokenizer: decodes token numbers (`decode(list[int]) -> str`).
        stop: strings that end it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        decode = tokenizer.decode
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):  # the text as it is, not made prettier
            decode = functools.partial(decode, clean_up_tokenization_spaces=False)
        self._text = Detokenizer(decode)
        self._stop = tuple(stop)
        self._reach = max(len(text) for text in stop)
        self._tail = ""

    def push(self, token: int) -> str | None:
        """Add a token; the stop string that the text now has, the one that begins first."""
        new = self._text.push([token])
        if not new:
            return None
        text = self._tail + new
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop if stop in text]
        self._tail = text[max(0, len(text) - self._reach + 1) :]
        return min(found)[2] if found else None
