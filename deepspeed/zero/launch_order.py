"""One order of rounds for ranks whose messages carry no tags.

[Note: launch order] NCCL pairs calls by their order alone, and the order in which gradients are complete may differ
from rank to rank. So a round waits until those before it in an agreed sequence were launched: in each cycle, one
round of each group in the order in which backward usually completes them. A rank whose branch skipped a group cannot
know yet whether others have a round of it; what comes after waits for the agreement at the window's end, where counts
are equal, and is launched from there in the same sequence, without what has no round left. Rounds in a dtype that a
group does not usually travel in come last.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

Item = tuple[Any, Any, int]  # bucket, round, sequence number


class LaunchOrder:
    """Holds rounds back until it is their turn.

    Args:
        buckets: all that may have rounds, in the same order on all ranks.
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

    def flush(self, used: Sequence[Any]) -> None:
        """Launch what waits: all ranks have as many rounds of each group now.

        Args:
            used: buckets that had rounds in this window on some rank; the next one is expected to be like it.
        """
        cycle = self._expected()
        late = [bucket for bucket in self._all if bucket not in cycle]
        while any(self._usual[id(bucket)] for bucket in cycle):
            waiting = self._usual[id(cycle[self._at % len(cycle)])]
            self._at += 1
            if waiting:
                self._depart(*waiting.popleft())
        for kind, buckets in ((self._usual, late), (self._rare, self._all)):
            for bucket in buckets:
                while waiting := kind[id(bucket)]:
                    self._depart(*waiting.popleft())
        self._at, self._cycle = 0, [bucket for bucket in reversed(self._all) if bucket in used] or None

    def _expected(self) -> list[Any]:
        if self._cycle is None:
            self._cycle = [bucket for bucket in reversed(self._all) if bucket.sum is not None]
        return self._cycle
