"""Whether all ranks gather the same groups in the same order, where gathers are collectives that carry no names.

[Note: gather order] NCCL pairs gathers by their order alone: ranks that need different units would hang, or take one
unit's values for another's. So ranks compare, by name and over the host's backend, what each is about to gather. That
costs a message between hosts per gather, and is done while nothing is known (the first steps), and from where a pass
differs from the last one of its kind until its end. What a rank gathers as it did in a pass that was compared is free.
A rank alone in its change finds the others where they meet next, each with its count of gathers; until then the watch
over hangs is what ends it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import Handle, spread
from deepspeed.comm.lockstep import Lockstep
from deepspeed.comm.together import meet_before

STEPS, PASSES = 10, 100  # compared from the first gather to the last: so many steps, or passes where nothing is trained
_REMEMBERED = 8  # kinds of passes


class GatherOrder:
    """The gathers of one engine.

    Args:
        axis: ranks that gather alike.
        always: compare every gather (`stage3_check_order`).
        promised: the user says that ranks do not differ (`stage3_fixed_graph`): compare where ranks meet only.
    """

    def __init__(self, axis: Axis, always: bool = False, promised: bool = False) -> None:
        self.axis, self.lockstep = axis, Lockstep(axis)
        self._always, self._promised = always, promised
        self._count = self._steps = self._passes = 0
        self._usual: dict[Hashable, list[Any]] = {}  # by kind of pass
        self._kind: Hashable = None
        self._now: list[Any] = []
        self._last = ""  # what was gathered last
        self._as_usual = True

    def begin(self, kind: Hashable) -> None:
        """A pass begins; what the last one gathered is what its kind is expected to gather from now on."""
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
        """`group` is about to be gathered.

        Raises:
            OrderError: on all ranks, when another rank is about to do something else.
        """
        usual, place = self._usual.get(self._kind, ()), len(self._now)
        self._as_usual = self._as_usual and place < len(usual) and usual[place] is group
        self._now.append(group)
        early = self._steps < STEPS and self._passes < PASSES
        if self._always or early or not self._as_usual:
            self._compare(f"gather of {group.name}")
        self._count, self._last = self._count + 1, group.name

    def step(self) -> None:
        """Ranks have met for an update."""
        self._steps += 1

    def meet(self, what: str) -> None:
        """Ranks meet for something else: all of them must have as many gathers behind them."""
        last = f", the last of {self._last}" if self._last else ""
        self.lockstep.compare(f"{what} after {self._count} gathers{last}")

    def _compare(self, what: str) -> None:
        if self._always or not self._promised:
            self.meet(what)


def gather_all(group: Any, tag: int, label: str) -> Handle:
    """Start the collective that brings every slice of a group to all ranks of its axis.

    Args:
        group: a ShardGroup, its full buffer grown and the own slice in it or on its way.
        tag: the message tag, where messages have one.
        label: for reports.

    Raises:
        OrderError: on all ranks, when they are about to gather different groups where messages carry no names.
    """
    meet_before(group.axis, label)
    if group.gather_order is not None:
        group.gather_order.before(group)
    return spread(group.axis, group.full, group.layout.cuts, tag, label)
