"""One order of rounds for ranks whose messages carry no tags.

[Note: launch order] NCCL pairs calls by their order alone, and the order in which gradients are complete may differ
from rank to rank. So a round waits until those before it in an agreed sequence were launched: in each cycle, one
round of each group in the order in which backward usually completes them. A rank whose branch skipped a group cannot
know yet whether others have a round of it; what comes after waits until the ranks meet next (the window's end, a save
within it), also where their counts are equal already, and is launched from there in the same sequence, without what
has no round left. Rounds in a dtype that a group does not usually travel in come last.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

Item = tuple[Any, Any, int]  # bucket, round, sequence number


class LaunchOrder:
    """Holds rounds back until it is their turn.

    Args:
        buckets: all that may have rounds, in the order in which backward completes them; the same on all ranks.
        depart: sends one.
    """

    def __init__(self, buckets: Sequence[Any], depart: Callable[[Any, Any, int], None]) -> None:
        self._all, self._depart = buckets, depart
        self._cycle: list[Any] | None = None  # None: all that are trained
        self._at = 0
        self._usual: defaultdict[int, deque[Item]] = defaultdict(deque)
        self._rare: defaultdict[int, deque[Item]] = defaultdict(deque)

    def add(self, item: Item, usual: bool) -> None:
        """A round is complete.

        Args:
            item: what `depart` is given.
            usual: it travels in the dtype that its group usually travels in.
        """
        (self._usual if usual else self._rare)[id(item[0])].append(item)
        cycle = self._expected()
        while cycle and (waiting := self._usual[id(cycle[self._at % len(cycle)])]):
            self._at += 1
            self._depart(*waiting.popleft())

    def holds(self, bucket: Any) -> bool:
        """Whether a round of `bucket` waits for its turn."""
        return bool(self._usual[id(bucket)] or self._rare[id(bucket)])

    def flush(self, used: Sequence[Any] | None = None) -> None:
        """Launch what waits: all ranks have as many rounds of each group now, and all call together.

        Args:
            used: buckets that had rounds in this window on some rank; the next one is expected to be like it. None: the
                window goes on, and what is expected stays.
        """
        cycle = self._expected()
        waiting = sum(len(self._usual[id(bucket)]) for bucket in cycle)
        while waiting:
            rounds = self._usual[id(cycle[self._at % len(cycle)])]
            self._at += 1
            if rounds:
                waiting -= 1
                self._depart(*rounds.popleft())
        inside = {id(bucket) for bucket in cycle}
        late = [bucket for bucket in self._all if id(bucket) not in inside]
        for kind, buckets in ((self._usual, late), (self._rare, self._all)):
            for bucket in buckets:
                while rounds := kind[id(bucket)]:
                    self._depart(*rounds.popleft())
        self._at = 0
        if used is not None:
            wanted = {id(bucket) for bucket in used}
            self._cycle = [bucket for bucket in self._all if id(bucket) in wanted] or None

    def _expected(self) -> list[Any]:
        if self._cycle is None:
            self._cycle = [bucket for bucket in self._all if bucket.sum is not None]
        return self._cycle
