"""Speculative decoding: proposes the next tokens by n-gram lookup in the text."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2  # tokens that have to be equal
TRIAL, PAYS = 12, 0.3  # guesses before the first judgement, and the part of them that has to hold
REST = 64  # tokens without guesses after a bad judgement


class NgramProposer:
    """N-grams of one sequence. It stops guessing for a while where guesses do not hold.

    Args:
        most: guesses at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._places: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self._judged = self._held = self._resting = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`."""
        self._learn(tokens)
        if self._resting > 0:
            self._resting -= 1
            return []
        for length in range(LONGEST, SHORTEST - 1, -1):
            place = self._places.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if place is not None:
                return list(tokens[place : place + min(self.most, most)])
        return []

    def judge(self, guessed: int, held: int) -> None:
        """Learn how many of the last guesses held."""
        self._judged, self._held = self._judged + guessed, self._held + held
        if self._judged >= TRIAL:
            if self._held < PAYS * self._judged:
                self._resting = REST
            self._judged = self._held = 0

    def _learn(self, tokens: Sequence[int]) -> None:
        """Index n-grams that something follows."""
        for end in range(max(self._seen, SHORTEST), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._places[tuple(tokens[end - length : end])] = end
        self._seen = max(self._seen, len(tokens))
