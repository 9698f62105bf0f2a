"""Prefetch of all-gathers by the module order of the last pass, within the limits of the JSON.

[Note: costs] A pass uses every group a few times, so no operation on one group may iterate over all groups. Sums are
updated incrementally, positions in the last pass are looked up, and two heaps return the next sharded group to start
and the idle one that is needed last. A heap entry is only a hint, which is checked when it is popped.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from deepspeed.zero.parameters.shard_group import ShardGroup, State

# Passes that begin differently (training, evaluation, a child or a method called by itself) are remembered apart.
_REMEMBERED = 8
# Events of a profile: a gather is started as it is needed, is waited for, is started ahead.
FETCH_SUBMIT, FETCH_WAIT, PREFETCH_SUBMIT = "fetch_submit", "fetch_wait", "prefetch_submit"
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class PrefetchLimits:
    """Limits in elements, not bytes, as in the JSON.

    Args:
        live: maximum of gathered elements (`stage3_max_live_parameters`).
        reuse: a group is kept if its next use is within this number of gathered elements (`stage3_max_reuse_distance`).
        prefetch: maximum of elements gathered ahead of use (`stage3_prefetch_bucket_size`), or the next unit if that is
            larger; 0: no prefetch.
    """

    live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    prefetch: int = 50_000_000


@dataclass
class _GatherOrder:
    """Groups in the order in which they were needed.

    Args:
        groups: one entry per use.
        units: by entry, the index of its gather in the pass.
    """

    groups: list[ShardGroup] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)  # entries of each group, by its id
    before: list[int] = field(default_factory=lambda: [0])  # elements needed before each entry

    def index(self) -> None:
        """Build the lookup tables after the pass."""
        for place, group in enumerate(self.groups):
            self.places.setdefault(id(group), []).append(place)
            self.before.append(self.before[-1] + group.numel)


class ModuleOrder:
    """Order of the groups' uses in the last pass of a kind, and the position of the running pass in it."""

    def __init__(self) -> None:
        self._passes: dict[Hashable, _GatherOrder] = {}
        self._kind: Hashable = None
        self._last, self._now = _GatherOrder(), _GatherOrder()
        self._at = 0
        self.restarts = 0

    def restart(self, kind: Hashable = None) -> None:
        """Begin a pass; the order of the last pass of the same kind is expected."""
        if self._now.groups:
            known = self._passes.pop(self._kind, None)
            if known is None or known.groups != self._now.groups or known.units != self._now.units:
                known = self._now
                known.index()
            self._passes[self._kind] = known
            if len(self._passes) > _REMEMBERED:
                del self._passes[next(iter(self._passes))]
        self._kind, self._last = kind, self._passes.get(kind) or _GatherOrder()
        self._now, self._at = _GatherOrder(), 0
        self.restarts += 1

    def used(self, *groups: ShardGroup) -> range:
        """Record that one unit needs these groups now; returns the skipped entries of the last pass."""
        unit = self._now.units[-1] + 1 if self._now.units else 0
        reached, skipped = self._at, 0
        for group in groups:
            self._now.groups.append(group)
            self._now.units.append(unit)
            place = self.place(group)
            if place is not None:
                skipped += place - self._at
                self._at = place + 1
        return range(reached, self._at if skipped else reached)

    def coming(self) -> list[ShardGroup]:
        """Return the groups that the last pass needed from here on, nearest first."""
        return self._last.groups[self._at :]

    def place(self, group: ShardGroup) -> int | None:
        """Return the entry of the last pass in which `group` is needed next; None if there is none or it is unknown."""
        places = self._last.places.get(id(group), ())
        index = bisect_left(places, self._at)
        return places[index] if index < len(places) else None

    def at(self, place: int) -> ShardGroup:
        return self._last.groups[place]

    def over(self, place: int) -> bool:
        return place < self._at

    def next_unit(self) -> list[ShardGroup]:
        """Return the groups that the next unit will need."""
        units, end = self._last.units, self._at
        while end < len(units) and units[end] == units[self._at]:
            end += 1
        return self._last.groups[self._at : end]

    def distance(self, group: ShardGroup) -> int | None:
        """Return the elements needed before the next use of `group`; None if there is none or it is unknown."""
        place = self.place(group)
        return None if place is None else self._last.before[place] - self._last.before[self._at]

    def is_invalid_trace(self) -> bool:
        """Return whether there is no recorded last pass; the name is that of upstream."""
        return not self.known

    def _invalidate_trace(self) -> None:
        self._passes.clear()
        self._last, self._now, self._at = _GatherOrder(), _GatherOrder(), 0
        self.restarts += 1

    @property
    def begun(self) -> bool:
        return bool(self._now.groups)

    @property
    def known(self) -> bool:
        return bool(self._last.groups)


class PrefetchScheduler:
    """Applies the limits: reshards groups that exceed them, and all-gathers groups ahead of use."""

    def __init__(self, groups: list[ShardGroup], limits: PrefetchLimits) -> None:
        self.groups, self.limits, self.trace = groups, limits, ModuleOrder()
        everything = sum(g.numel for g in groups)
        if min(limits.live, limits.reuse) >= everything:  # all may be here at once, so memory is set aside for all
            for group in groups:
                group.retain()
        self.peak = 0  # most elements gathered or in flight at once
        self.gathers = 0
        self.late = 0  # gathers of a known pass that were started when their unit needed them, not ahead
        self.profile: Callable[[str, int], AbstractContextManager[None]] | None = None  # takes an event, its elements
        self._number = {id(g): number for number, g in enumerate(groups)}
        self._here: dict[int, ShardGroup] = {}  # gathered or in flight, by id
        self._used: dict[int, ShardGroup] = {}  # gathered for a unit that is not done with it
        self._ahead: dict[int, ShardGroup] = {}  # in flight and not needed yet
        self._live = self._on_the_way = 0  # elements of `_here`, of `_ahead`
        self._unit: tuple[ShardGroup, ...] = ()  # the last that was gathered
        self._coming: list[int] = []  # heap: entries of the last pass whose groups may be sharded
        self._idle: list[tuple[float, int]] = []  # heap: (- entry of next use, number) of groups that may be idle here
        self._restarts = -1
        for group in groups:
            self.note(group)

    def live(self) -> int:
        return self._live

    def note(self, group: ShardGroup) -> None:
        """Update the bookkeeping after a possible change of a group's state."""
        key, state = id(group), group.state
        if state is not State.INFLIGHT and self._ahead.pop(key, None) is not None:
            self._on_the_way -= group.numel
        if state is not State.SHARDED:
            if key not in self._here:
                self._here[key] = group
                self._live += group.numel
        elif self._here.pop(key, None) is not None:
            self._live -= group.numel
            self._used.pop(key, None)
            self._queue(group)

    def _queue(self, group: ShardGroup) -> None:
        """Queue a group among those to start, or those that may be freed."""
        place = self.trace.place(group)
        if group.state is not State.SHARDED:
            heappush(self._idle, (-math.inf if place is None else -place, self._number[id(group)]))
        elif place is not None:
            heappush(self._coming, place)

    def _follow(self) -> None:
        """Rebuild the queues after a new pass has begun."""
        if self._restarts != self.trace.restarts:
            self._restarts = self.trace.restarts
            self._coming.clear()
            self._idle.clear()
            for group in self.groups:
                self._queue(group)

    def make_room(self, group: ShardGroup) -> None:
        """Free idle groups, those needed last first, until `group` fits the live limit."""
        if group.state is State.SHARDED:
            self._evict(self.limits.live - group.numel)

    def _evict(self, limit: int) -> None:
        """Free idle groups, those needed last first, until at most `limit` elements are gathered."""
        if self._live <= limit:
            return
        self._follow()
        while self._idle and self._live > limit:
            expected, number = heappop(self._idle)
            group = self.groups[number]
            if group.state is State.SHARDED or group.users:
                continue
            place = self.trace.place(group)
            if expected != (-math.inf if place is None else -place):
                self._queue(group)
            else:
                self._free(group)

    def _free(self, group: ShardGroup) -> None:
        group.reshard()
        self.note(group)

    def gather(self, *groups: ShardGroup) -> None:
        """All-gather the groups of a unit, and start the following ones."""
        self._follow()
        expected = self.trace.known and self.trace.begun
        for place in self.trace.used(*groups):
            self._queue(self.trace.at(place))
        self._unit = groups
        for group in groups:
            self._used[id(group)] = group
            if self._ahead.pop(id(group), None) is not None:
                self._on_the_way -= group.numel
            if group.state is State.SHARDED:
                self.late += expected
                self.make_room(group)
                with self._event(FETCH_SUBMIT, group):
                    self._start(group)
        self._prefetch()
        self._read_ahead()
        for group in groups:
            with self._event(FETCH_WAIT, group) if group.state is State.INFLIGHT else _NOTHING:
                group.wait_all_gather()
            self.note(group)

    def _event(self, name: str, group: ShardGroup) -> AbstractContextManager[None]:
        if self.profile is None:
            return _NOTHING
        return self.profile(name, sum(member.shape.numel() for member in group.members))  # without what fills it up

    def _start(self, group: ShardGroup) -> None:
        group.start_all_gather()
        self.note(group)
        self.gathers += 1
        self.peak = max(self.peak, self._live)

    def _prefetch(self) -> None:
        """Start the next unit, whatever its size, and then groups within the limits."""
        if self.limits.prefetch <= 0 or not self._prefetch_unit():
            return
        for group in self._sharded_to_come():
            if self._on_the_way + group.numel > self.limits.prefetch or self._live + group.numel > self.limits.live:
                return
            self._start_ahead(group)

    def _read_ahead(self) -> None:
        """Start to load the next shard for a gather from its tier, so that the gather does not wait.

        During recomputation the next unit is the current one again, so the search continues after it.
        """
        group = next(self._sharded_to_come(), None) if self.limits.prefetch > 0 else None
        if group is not None:
            group.expect_gather()

    def _prefetch_unit(self) -> bool:
        """Start the next unit if it fits next to the groups in use; returns whether it is gathered or in flight."""
        unit = self.trace.next_unit()
        missing = [g for g in unit if g.state is State.SHARDED]
        if not missing:
            return True
        together = {id(g): g.numel for g in (*unit, *self._unit)}
        limit = max(self.limits.live, sum(together.values()))
        beside = together | {key: g.numel for key, g in self._used.items()}
        if sum(beside[key] for key in {*self._used, *map(id, unit)}) > limit:
            return False
        for group in missing:
            if group.state is State.SHARDED:  # a unit may name a group twice
                self._evict(limit - group.numel)
                self._start_ahead(group)
        return True

    def _start_ahead(self, group: ShardGroup) -> None:
        with self._event(PREFETCH_SUBMIT, group):
            self._start(group)
        if group.state is State.INFLIGHT:
            self._ahead[id(group)] = group
            self._on_the_way += group.numel
        self._queue(group)

    def _sharded_to_come(self) -> Iterator[ShardGroup]:
        """Yield sharded groups that will be needed, nearest first; groups that are not started are yielded again."""
        while self._coming:
            place = self._coming[0]
            if not self.trace.over(place) and self.trace.at(place).state is State.SHARDED:
                yield self.trace.at(place)
                if self.trace.at(place).state is State.SHARDED:
                    return
            else:
                heappop(self._coming)

    def release(self, group: ShardGroup) -> None:
        """Free a group that is not in use any more, unless it is needed again soon and fits the limits."""
        if group.users:
            return
        self._follow()
        self._used.pop(id(group), None)
        distance = self.trace.distance(group)
        if distance is None and not self.trace.known and torch.is_grad_enabled():
            distance = 0  # the first pass: its backward is still to come
        stays = distance is not None and distance <= self.limits.reuse and self._live <= self.limits.live
        ahead = self.limits.prefetch > 0
        if stays or (ahead and group in self.trace.next_unit()):  # which would be started again at once
            self._queue(group)
            return
        self._free(group)
        if ahead:
            self._prefetch_unit()

    def free_idle(self) -> None:
        """Free all groups that are not in use (before an update, at the end of a pass)."""
        for group in list(self._here.values()):
            if not group.users:
                self._free(group)
