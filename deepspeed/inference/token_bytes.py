"""Bytes of single tokens: a token may hold a part of a character, which has no text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # token of one byte, in vocabularies with byte fallback
_PER_TOKEN = {"Replace", "ByteFallback", "Metaspace", "Strip"}  # decoders that change each token by itself


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies (GPT-2's): printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def decode_function(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return `tokenizer.decode` for exact text: without the clean-up of spaces."""
    options = {"skip_special_tokens": True} if skip_special_tokens else {}
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):
        options["clean_up_tokenization_spaces"] = False
    return functools.partial(tokenizer.decode, **options)


def spelling(tokenizer: Any, token: int) -> str | None:
    """Return the spelling of a token in the vocabulary; None if the tokenizer lacks the id or has no vocabulary."""
    try:
        return tokenizer.convert_ids_to_tokens(token)
    except (AttributeError, IndexError, KeyError, OverflowError):  # models may have more rows than their tokenizers
        return None


def _decoders(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the decoder steps of a tokenizer of the library `tokenizers`; [] for others, or without a decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return []
    try:
        stated = json.loads(decoder.__getstate__())
    except Exception:  # a decoder in Python has no description
        return []
    return stated.get("decoders") or [stated]


class TokenBytes:
    """Bytes that each token adds to the text, for tokenizers whose text is the concatenation of these bytes.

    Args:
        tokenizer: the tokenizer.
        skip_special_tokens: whether special tokens are omitted from the text; they have no bytes then.
        keep: special tokens that are not omitted.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        kinds = [step["type"] for step in _decoders(tokenizer)]
        self._byte_level, self._fallback = kinds == ["ByteLevel"], "ByteFallback" in kinds
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {*getattr(tokenizer, "all_special_ids", ()), *(n for n, t in added.items() if t.special)}
        self._keep = keep
        self._known: dict[tuple[int, bool], bytes] = {}
        self._before = self._plain_token()

    @staticmethod
    def of(tokenizer: Any, skip_special_tokens: bool, keep: frozenset[int] = frozenset()) -> TokenBytes | None:
        """Return the bytes of a tokenizer's tokens; None if its text is no concatenation of theirs."""
        if not _decoders(tokenizer):  # any object with `decode`
            return None
        return TokenBytes._of_length(tokenizer, skip_special_tokens, keep, len(tokenizer))

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def _of_length(tokenizer: Any, skip_special_tokens: bool, keep: frozenset[int], _length: int) -> TokenBytes | None:
        """`of`, computed anew when tokens are added to the tokenizer."""
        steps = _decoders(tokenizer)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return TokenBytes(tokenizer, skip_special_tokens, keep)
        joined = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
        ends = [step for step in steps[joined + 1 :] if step["type"] != "Strip" or step["stop"]]
        if not kinds or ends or not _PER_TOKEN.issuperset(kinds[:joined]):
            return None
        table = TokenBytes(tokenizer, skip_special_tokens, keep)
        return table if table._before else None

    def _decode(self, tokens: list[int]) -> str:
        return decode_function(self._tokenizer, self._skip)(tokens)

    def _plain_token(self) -> list[int]:
        """Return a token that other tokens may follow in a text; [] if there is none."""
        for token in range(0 if self._byte_level else min(len(self._tokenizer), 10_000)):
            text = self._decode([token]) if token not in self._special else ""
            if len(text) == 1 and text.isalnum() and self._decode([token, token]).startswith(text):
                return [token]
        return []

    def wordless(self, token: int) -> bool:
        """Return whether a token is special, or an id that the tokenizer lacks: a text may begin after it."""
        return token in self._special or spelling(self._tokenizer, token) is None

    def of_token(self, token: int, first: bool = False) -> bytes:
        """Return the bytes of a token.

        Args:
            first: whether no token of the text is before it; some tokenizers omit a space there.
        """
        key = (token, first)
        if key not in self._known:
            self._known[key] = self._compute(token, first)
        return self._known[key]

    def _compute(self, token: int, first: bool) -> bytes:
        spelled = spelling(self._tokenizer, token)
        if spelled is None or (self._skip and token in self._special and token not in self._keep):
            return b""
        if token in self._keep:
            return spelled.encode()
        if self._byte_level:
            stored = [_byte_alphabet().get(character) for character in spelled]
            return spelled.encode() if None in stored else bytes(byte for byte in stored if byte is not None)
        byte = _BYTE.fullmatch(spelled) if self._fallback else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        before = [] if first else self._before
        return self._decode([*before, token])[len(self._decode(before)) if before else 0 :].encode()


def token_names(tokenizer: Any, tokens: list[tuple[int, bytes]]) -> list[str]:
    """Return a name for each token of one position; different tokens have different names.

    A name is the token's text; `bytes:\\x…` for parts of characters; the vocabulary's spelling for tokens without text,
    such as special ones; `token_id:…` for ids that the tokenizer lacks, and where another token has the same text.

    Args:
        tokens: (token, its bytes), the chosen one first.
    """
    taken: dict[str, int] = {}
    names = []
    for token, text in tokens:
        try:
            name = text.decode() or spelling(tokenizer, token) or ""
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
        if not name or taken.setdefault(name, token) != token:
            name = f"token_id:{token}"
        names.append(name)
    return names
