"""Incremental detokenization and search for stop strings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

_LONGEST_PENDING = 32  # maximum tokens without complete text; then they are decoded in parts
_CHARACTER = 4  # maximum bytes of a character; a token has at least one byte
_CONTEXT = 6  # context tokens before the first new one
_REPLACEMENT = "\ufffd"  # text of an incomplete character


class Detokenizer:
    """Incremental decoder for one sequence.

    Args:
        decode: maps token ids to text.
        before: tokens before the first new one; they determine whether the new text begins with a space.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens: list[int] = list(before)
        self._begun, self._shown = 0, len(self._tokens)  # start of the decoded context, and end of the returned text

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """Append tokens and return the new text. An incomplete last character is held back unless `final`."""
        self._tokens += tokens
        if text := self._decode_to(len(self._tokens), final):
            return text
        if len(self._tokens) - self._shown <= _LONGEST_PENDING:
            return ""
        # Tokens without text for so long are no characters, or will not become any. Decoding all of them again for
        # each new token would be slow.
        for end in range(len(self._tokens) - 1, len(self._tokens) - _CHARACTER, -1):
            if text := self._decode_to(end, final=False):
                return text
        if text := self._decode_to(len(self._tokens) - _CHARACTER, final=True):
            return text
        del self._tokens[self._shown :]
        return ""

    def _decode_to(self, end: int, final: bool) -> str:
        """Return the new text up to token `end`, decoded after earlier tokens; "" if incomplete and not `final`."""
        before = self._decode(self._tokens[self._begun : self._shown])
        whole = self._decode(self._tokens[self._begun : end])
        if len(whole) <= len(before) or (whole.endswith(_REPLACEMENT) and not final):
            return ""
        self._tokens, self._begun, self._shown = self._tokens[self._shown :], 0, end - self._shown
        return whole[len(before) :]


class TextStream:
    """Text stream of one answer, which ends before the first stop string.

    The generator uses the attribute `matched`, the detected stop string or None; the server uses the returned text.

    Args:
        tokenizer: object with a method `decode(list[int]) -> str`.
        stops: the stop strings.
        before: tokens of the prompt; they determine whether the text begins with a space.
        skip_special_tokens: whether special tokens are omitted from the text.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = (), skip_special_tokens: bool = False
    ) -> None:
        options = {"skip_special_tokens": True} if skip_special_tokens else {}
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):  # keep the exact text
            options["clean_up_tokenization_spaces"] = False
        self._detokenizer = Detokenizer(functools.partial(tokenizer.decode, **options), before[-_CONTEXT:])
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the new text, up to an incomplete character or a possible start of a stop string.

        Set `matched` to the stop string that these tokens complete, or None; if several, to the one that begins first.
        """
        old = len(self._held)
        self._held += self._detokenizer.push(tokens)
        places = [(self._held.find(stop, max(0, old - len(stop) + 1)), -len(stop), stop) for stop in self._stops]
        self.matched = min((place for place in places if place[0] >= 0), default=(0, 0, None))[2]
        kept_back = 0
        for stop in self._stops:
            sizes = range(min(len(self._held), len(stop)), kept_back, -1)
            kept_back = next((size for size in sizes if self._held.endswith(stop[:size])), kept_back)
        return self._release(len(self._held) - kept_back)

    def finish(self, tokens: Sequence[int], matched: int | str | None) -> str:
        """Append the last tokens and return the remaining text, without the end token or stop string `matched`."""
        ended = isinstance(matched, int) and bool(tokens) and tokens[-1] == matched
        self._held += self._detokenizer.push(tokens[:-1] if ended else tokens, final=True)
        place = self._held.find(matched) if isinstance(matched, str) else -1
        self._held = self._held if place < 0 else self._held[:place]
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
