"""Order of collectives without message tags: gradient reductions in a fixed order, and a check of all-gathers.

[Note: launch order] NCCL matches collectives by their order only, but gradients may be complete in different orders on
different ranks. Rounds (reduce-scatters of a bucket) are therefore launched in a fixed cyclic sequence: one round of
each bucket, in the order in which backward usually completes them. If a rank skips a bucket because it took another
branch of the model, it cannot know whether other ranks have a round of it. Later rounds then stay queued until the next
synchronization of the ranks (end of the window, or a checkpoint), where they are launched in the same sequence. Rounds
in another dtype than the usual one of their bucket are launched last.

[Note: gather order] NCCL matches all-gathers by their order only: if ranks gathered different modules, they would hang
or get wrong values. Ranks therefore compare the name of the next group over the CPU backend, which costs one message
per all-gather. This is done in the first steps, and if a pass differs from the last pass of its kind, from there to its
end. All-gathers in the order of an earlier pass are not compared. If only one rank differs, the difference is detected
at the next synchronization, where ranks compare their numbers of all-gathers; until then, they may hang.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from deepspeed.comm.collectives.same_error import OrderCheck, meet_before
from deepspeed.comm.process_groups.axis import Axis

Item = tuple[Any, Any, int]  # bucket, round, sequence number


class LaunchOrder:
    """Queue that launches rounds in a fixed order; see [Note: launch order].

    Args:
        buckets: buckets in the order in which backward completes them, equal on all ranks.
        depart: function that launches a round, given bucket, round and sequence number.
    """

    def __init__(self, buckets: Sequence[Any], depart: Callable[[Any, Any, int], None]) -> None:
        self._all, self._depart = buckets, depart
        self._cycle: list[Any] | None = None  # buckets of the sequence; None: all trained ones
        self._at = 0
        self._usual: defaultdict[int, deque[Item]] = defaultdict(deque)
        self._rare: defaultdict[int, deque[Item]] = defaultdict(deque)

    def add(self, item: Item, usual: bool) -> None:
        """Queue a complete round, and launch all rounds that the sequence allows.

        Args:
            item: bucket, round and sequence number.
            usual: whether the round has the bucket's usual dtype.
        """
        (self._usual if usual else self._rare)[id(item[0])].append(item)
        cycle = self._expected()
        while cycle and (waiting := self._usual[id(cycle[self._at % len(cycle)])]):
            self._at += 1
            self._depart(*waiting.popleft())

    def holds(self, bucket: Any) -> bool:
        return bool(self._usual[id(bucket)] or self._rare[id(bucket)])

    def flush(self, used: Sequence[Any] | None = None) -> None:
        """Launch all queued rounds; all ranks must have equal numbers of rounds per bucket.

        Args:
            used: buckets of the next sequence; None: unchanged; empty: all trained buckets.
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


STEPS, PASSES = 10, 100  # all-gathers are compared in so many first steps (without training: passes)
_REMEMBERED = 8  # maximum number of kinds of passes


class GatherOrder:
    """Comparison of the order of all-gathers over the ranks of an engine; see [Note: gather order].

    Args:
        axis: process group of the ranks that must gather in the same order.
        always: compare each all-gather (`stage3_check_order`).
        promised: compare only at other synchronizations, since the user guarantees the order (`stage3_fixed_graph`).
    """

    def __init__(self, axis: Axis, always: bool = False, promised: bool = False) -> None:
        self.axis, self.lockstep = axis, OrderCheck(axis)
        self._always, self._promised = always, promised
        self._count = self._steps = self._passes = 0
        self._usual: dict[Hashable, list[Any]] = {}  # by kind of pass
        self._kind: Hashable = None
        self._now: list[Any] = []
        self._last = ""  # name of the group that was gathered last
        self._as_usual = True

    def begin(self, kind: Hashable) -> None:
        """Begin a forward pass; compare over ranks if the kind changes, or if the last pass was shorter than usual.

        Args:
            kind: key of the pass; all-gathers are compared with those of the last pass with the same key.

        Raises:
            OrderError: other ranks do not begin a pass here; on all ranks.
        """
        shorter = len(self._now) < len(self._usual.get(self._kind, ()))
        changed = kind != self._kind or shorter
        self._usual.pop(self._kind, None)
        self._usual[self._kind] = self._now
        if len(self._usual) > _REMEMBERED:
            del self._usual[next(iter(self._usual))]
        self._kind, self._now, self._as_usual = kind, [], True
        self._passes += 1
        if changed and self._passes > 1:
            meet_before(self.axis, "a pass that begins")
            self._compare("a pass that begins")

    def before(self, group: Any) -> None:
        """Record that a group is gathered next, and compare over ranks if necessary.

        Raises:
            OrderError: ranks would gather different groups; on all ranks.
        """
        usual, place = self._usual.get(self._kind, ()), len(self._now)
        self._as_usual = self._as_usual and place < len(usual) and usual[place] is group
        self._now.append(group)
        early = self._steps < STEPS and self._passes < PASSES
        if self._always or early or not self._as_usual:
            self._compare(f"gather of {group.name}")
        self._count, self._last = self._count + 1, group.name

    def step(self) -> None:
        self._steps += 1

    def meet(self, what: str) -> None:
        """Compare number and last group of the all-gathers at the synchronization `what`. All ranks must call this.

        Raises:
            OrderError: number or last group differ; on all ranks.
        """
        last = f", the last of {self._last}" if self._last else ""
        self.lockstep.compare(f"{what} after {self._count} gathers{last}")

    def _compare(self, what: str) -> None:
        if self._always or not self._promised:
            self.meet(what)
