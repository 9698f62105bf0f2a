"""Incremental detokenization and search for stop strings."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.inference.token_bytes import TokenBytes, decode_function

_LONGEST_PENDING = 32  # maximum tokens without complete text; then they are decoded in parts
_CHARACTER = 4  # maximum bytes of a character; a token has at least one byte
_CONTEXT = 6  # context tokens before the first new one
_REPLACEMENT = "\ufffd"  # text of an incomplete character


class ByteDetokenizer:
    """Incremental decoder for one sequence of a tokenizer whose tokens have bytes of their own.

    Args:
        table: bytes of the tokens.
        before: tokens before the first new one.
    """

    def __init__(self, table: TokenBytes, before: Sequence[int] = ()) -> None:
        self._table = table
        self._first = all(table.wordless(token) for token in before)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fork(self) -> ByteDetokenizer:
        """Return an independent decoder in the same state."""
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    @property
    def incomplete(self) -> bool:
        """Whether the text ends within a character."""
        return bool(self._decoder.getstate()[0])

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` would add here."""
        return self._table.of_token(token, self._first)

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """Append tokens and return the new text. An incomplete last character is held back unless `final`."""
        text = ""
        for token in tokens:
            text += self._decoder.decode(self.piece(token))
            self._first = self._first and self._table.wordless(token)
        return text + self._decoder.decode(b"", True) if final else text


class Detokenizer:
    """Incremental decoder for one sequence of any tokenizer; text is what decoding one more token adds.

    Args:
        decode: maps token ids to text.
        before: tokens before the first new one; they determine whether the new text begins with a space.
    """

    incomplete = False  # an incomplete character begins with the token that completes it

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens: list[int] = list(before)
        self._begun, self._shown = 0, len(self._tokens)  # start of the decoded context, and end of the returned text

    def fork(self) -> Detokenizer:
        """Return an independent decoder in the same state."""
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        return other

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` would add here; none while a character is incomplete."""
        before = self._decode(self._tokens[self._begun : self._shown])
        whole = self._decode([*self._tokens[self._begun :], token])
        return b"" if whole.endswith(_REPLACEMENT) else whole[len(before) :].encode()

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
        keep: special tokens that are not omitted.
        min_tokens: number of first tokens that complete no stop string.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
        skip_special_tokens: bool = False,
        min_tokens: int = 0,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        table = TokenBytes.of(tokenizer, skip_special_tokens, keep)
        self._detokenizer: ByteDetokenizer | Detokenizer
        if table is not None:
            self._detokenizer = ByteDetokenizer(table, before)
        else:
            self._detokenizer = Detokenizer(decode_function(tokenizer, skip_special_tokens), before[-_CONTEXT:])
        self._stops, self._min_tokens = tuple(stops), min_tokens
        self._held = ""
        self._early = 0  # characters of `_held` that come from the first `min_tokens` tokens
        self._tokens = self._characters = 0  # numbers so far
        self.matched: str | None = None

    def fork(self) -> TextStream:
        """Return an independent stream in the same state."""
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        return other

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` would add to the text here."""
        return self._detokenizer.piece(token)

    def offset(self, token: int) -> int:
        """Return the number of characters before `token`, if it is next."""
        piece = self.piece(token)
        continues = bool(piece) and 0x80 <= piece[0] < 0xC0
        return self._characters + (self._detokenizer.incomplete and not continues)

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens and return the new text, up to an incomplete character or a possible start of a stop string.

        Set `matched` to the stop string that these tokens complete, or None; if several, to the one that begins first.
        """
        old = len(self._held)
        self._append(tokens)
        places = [(self._find(stop, old), -len(stop), stop) for stop in self._stops]
        self.matched = min((place for place in places if place[0] >= 0), default=(0, 0, None))[2]
        kept_back = 0
        for stop in self._stops:
            sizes = range(min(len(self._held), len(stop)), kept_back, -1)
            kept_back = next((size for size in sizes if self._held.endswith(stop[:size])), kept_back)
        return self._release(len(self._held) - kept_back)

    def finish(self, tokens: Sequence[int], matched: int | str | None) -> str:
        """Append the last tokens and return the remaining text, without the end token or stop string `matched`."""
        ended = isinstance(matched, int) and bool(tokens) and tokens[-1] == matched
        self._append(tokens[:-1] if ended else tokens, final=True)
        place = self._find(matched) if isinstance(matched, str) else -1
        self._held = self._held if place < 0 else self._held[:place]
        return self._release(len(self._held))

    def _append(self, tokens: Sequence[int], final: bool = False) -> None:
        before = len(self._held)
        for token in tokens:
            self._held += self._detokenizer.push([token])
            self._tokens += 1
            if self._tokens <= self._min_tokens:
                self._early = len(self._held)
        if final:
            self._held += self._detokenizer.push([], final=True)
        self._characters += len(self._held) - before

    def _find(self, stop: str, old: int = 0) -> int:
        """Return the place of the first `stop` in the held text that ends behind `old` characters; -1 if none."""
        return self._held.find(stop, max(0, max(old, self._early) - len(stop) + 1))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._early = max(self._early - count, 0)
        return text
