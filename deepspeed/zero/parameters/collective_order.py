"""Order of collectives without tags, and checks that all ranks all-gather in the same order.

[Note: launch order] NCCL matches calls by their order alone, and gradients may be complete in different orders on
different ranks. So a round waits until those before it in an agreed sequence were launched: in each cycle, one round of
each group in the order in which backward usually completes them. A rank whose branch skipped a group does not know
whether others have a round of it; later rounds wait until the ranks synchronize next (the window's end, a save within
it), also if their counts are equal already, and are launched then in the same sequence, without groups that have no
round left. Rounds in a dtype that a group does not usually have come last.

[Note: gather order] NCCL matches all-gathers by their order alone: ranks that need different units would hang, or use
one unit's values for another's. So ranks compare, by name and over the host's backend, what each gathers next. That
costs a message between hosts per gather. It is done in the first steps, and from the point where a pass differs from
the last one of its kind until its end; gathers as in a compared pass cost nothing. If one rank alone differs, it meets
the others at their next synchronization, each with its count of gathers; before that only the watchdog ends the hang.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from deepspeed.comm.collectives.same_error import OrderCheck, meet_before
from deepspeed.comm.process_groups.axis import Axis

Item = tuple[Any, Any, int]  # bucket, round, sequence number


class LaunchOrder:
    """Launches rounds in a fixed order; `buckets` are in the order in which backward completes them, on all ranks."""

    def __init__(self, buckets: Sequence[Any], depart: Callable[[Any, Any, int], None]) -> None:
        self._all, self._depart = buckets, depart
        self._cycle: list[Any] | None = None  # None: all that are trained
        self._at = 0
        self._usual: defaultdict[int, deque[Item]] = defaultdict(deque)
        self._rare: defaultdict[int, deque[Item]] = defaultdict(deque)

    def add(self, item: Item, usual: bool) -> None:
        """Queue a complete round; `usual`: the round has its group's usual dtype."""
        (self._usual if usual else self._rare)[id(item[0])].append(item)
        cycle = self._expected()
        while cycle and (waiting := self._usual[id(cycle[self._at % len(cycle)])]):
            self._at += 1
            self._depart(*waiting.popleft())

    def holds(self, bucket: Any) -> bool:
        return bool(self._usual[id(bucket)] or self._rare[id(bucket)])

    def flush(self, used: Sequence[Any] | None = None) -> None:
        """Launch queued rounds when all ranks have equal counts for each group. `used` are the groups expected next."""
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


STEPS, PASSES = 10, 100  # compared from the first gather to the last: so many steps, or passes where nothing is trained
_REMEMBERED = 8  # kinds of passes


class GatherOrder:
    """Compares the order of an engine's all-gathers over ranks.

    Args:
        axis: ranks that gather in the same order.
        always: compare every gather (`stage3_check_order`).
        promised: the user guarantees equal order (`stage3_fixed_graph`): compare only at other synchronizations.
    """

    def __init__(self, axis: Axis, always: bool = False, promised: bool = False) -> None:
        self.axis, self.lockstep = axis, OrderCheck(axis)
        self._always, self._promised = always, promised
        self._count = self._steps = self._passes = 0
        self._usual: dict[Hashable, list[Any]] = {}  # by kind of pass
        self._kind: Hashable = None
        self._now: list[Any] = []
        self._last = ""  # what was gathered last
        self._as_usual = True

    def begin(self, kind: Hashable) -> None:
        """Begin a pass; the gathers of the last pass of a kind are expected for the next one."""
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
        """Compare the next gathered group if necessary; raises `OrderError` on all ranks."""
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
        """Compare the number of gathers when ranks synchronize for another reason."""
        last = f", the last of {self._last}" if self._last else ""
        self.lockstep.compare(f"{what} after {self._count} gathers{last}")

    def _compare(self, what: str) -> None:
        if self._always or not self._promised:
            self.meet(what)
