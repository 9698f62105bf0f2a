"""Stop strings, found in the text of the tokens so far, wherever the tokens are cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from deepspeed.inference.detokenizer import Detokenizer


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
