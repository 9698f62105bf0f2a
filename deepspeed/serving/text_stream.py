"""Decodes tokens to text as they come, and cuts at stop strings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from deepspeed.inference.detokenizer import Detokenizer

_BEHIND = 6  # tokens of a prompt that are decoded again


class TextStream:
    """Text of one answer.

    Args:
        tokenizer: of the model.
        stops: strings that end the text; they are no part of it.
        prompt: tokens before the answer; the last ones decide whether the first new one begins with a space.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = (), prompt: Sequence[int] = ()) -> None:
        decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._stops = stops
        self._text = Detokenizer(decode, prompt[-_BEHIND:])
        self._held = ""

    def push(self, tokens: list[int]) -> str:
        """Text that is certain after these tokens: no half characters, nothing that may begin a stop string."""
        self._held += self._text.push(tokens)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._give(len(self._held) - keep)

    def finish(self, tokens: list[int], matched: int | str | None) -> str:
        """The rest, without the end token or the stop string.

        Args:
            tokens: the last ones.
            matched: the token or string that ended the text.
        """
        ended = isinstance(matched, int) and bool(tokens) and tokens[-1] == matched
        self._held += self._text.push(tokens[:-1] if ended else tokens, final=True)
        if isinstance(matched, str) and (at := self._held.find(matched)) >= 0:
            self._held = self._held[:at]
        return self._give(len(self._held))

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        return given


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    for size in range(min(len(text), len(stop)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
