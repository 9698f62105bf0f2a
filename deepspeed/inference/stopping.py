"""Stop strings, found in the text of the tokens so far, wherever the tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OVERLAP = 4  # tokens before the new one that are decoded again: a character may be cut over so many


class StopStrings:
    """Watches one request's text.

    Args:
        tokenizer: decodes token numbers (`decode(list[int]) -> str`).
        stop: strings that end it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._reach = max(len(text) for text in stop)
        self._tokens: list[int] = []

    def push(self, token: int) -> str | None:
        """Add a token; the stop string that the text now has, the one that begins first."""
        self._tokens.append(token)
        text = self._tail()
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop if stop in text]
        return min(found)[2] if found else None

    def _tail(self) -> str:
        """Text of the last tokens, enough for any stop string that the newest one could end."""
        count = self._reach + OVERLAP
        while True:
            text = self._tokenizer.decode(self._tokens[-count:])
            if count >= len(self._tokens) or len(text.rstrip("\ufffd")) >= self._reach + OVERLAP:
                return text
            count *= 2
