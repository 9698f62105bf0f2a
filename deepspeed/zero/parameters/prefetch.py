"""Prefetch of all-gathers in the recorded order of the last pass, within the configured limits.

[Note: costs] An operation on one group must not iterate over all groups, since each pass has several operations per
group. Sums are therefore updated incrementally, positions in the last pass are looked up in tables, and two heaps
return the next group to prefetch and the idle group that is needed last. Entries of the heaps may be outdated, which is
checked when they are popped.
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

# Maximum number of kinds of passes whose order is stored: training, evaluation, calls of single modules.
_REMEMBERED = 8
# Events of the profiler: start of an all-gather that was not prefetched, wait, start of a prefetch.
FETCH_SUBMIT, FETCH_WAIT, PREFETCH_SUBMIT = "fetch_submit", "fetch_wait", "prefetch_submit"
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class PrefetchLimits:
    """Limits of gathered parameters, in elements (not bytes).

    Args:
        live: maximum number of gathered elements (`stage3_max_live_parameters`); running and next unit may exceed it.
        reuse: keep a group gathered if at most so many elements are used before its next use
            (`stage3_max_reuse_distance`).
        prefetch: maximum number of prefetched elements (`stage3_prefetch_bucket_size`); a single unit may exceed it;
            0: no prefetch.
    """

    live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    prefetch: int = 50_000_000


@dataclass
class _GatherOrder:
    """Uses of groups in one pass, in order.

    Args:
        groups: group of each use.
        units: number of the unit of each use; uses of one unit are gathered together.
        places: indices of the uses of each group, by its id.
        before: sum of the elements of all earlier uses, for each use.
    """

    groups: list[ShardGroup] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)
    before: list[int] = field(default_factory=lambda: [0])

    def index(self) -> None:
        """Compute `places` and `before` after the pass."""
        for place, group in enumerate(self.groups):
            self.places.setdefault(id(group), []).append(place)
            self.before.append(self.before[-1] + group.numel)


class ModuleOrder:
    """Recorded order in which groups were used in the last pass of each kind, and current position in it."""

    def __init__(self) -> None:
        self._passes: dict[Hashable, _GatherOrder] = {}
        self._kind: Hashable = None
        self._last, self._now = _GatherOrder(), _GatherOrder()
        self._at = 0
        self.restarts = 0

    def restart(self, kind: Hashable = None) -> None:
        """Begin a pass; its expected order is that of the last pass with the same `kind`."""
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
        """Record that one unit uses these groups now, and advance the position in the last pass.

        Returns:
            Indices of uses of the last pass that may have been skipped.
        """
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
        """Return the groups of the remaining uses of the last pass, in order."""
        return self._last.groups[self._at :]

    def place(self, group: ShardGroup) -> int | None:
        """Return the index of the next use of a group in the last pass; None if there is none."""
        places = self._last.places.get(id(group), ())
        index = bisect_left(places, self._at)
        return places[index] if index < len(places) else None

    def at(self, place: int) -> ShardGroup:
        return self._last.groups[place]

    def over(self, place: int) -> bool:
        return place < self._at

    def next_unit(self) -> list[ShardGroup]:
        """Return the groups of the next unit in the last pass."""
        units, end = self._last.units, self._at
        while end < len(units) and units[end] == units[self._at]:
            end += 1
        return self._last.groups[self._at : end]

    def distance(self, group: ShardGroup) -> int | None:
        """Return the number of elements that are used before the next use of a group; None if there is none."""
        place = self.place(group)
        return None if place is None else self._last.before[place] - self._last.before[self._at]

    def is_invalid_trace(self) -> bool:
        """Return whether no last pass of this kind is recorded (a method of upstream DeepSpeed that programs call)."""
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
    """Scheduler of all-gathers: prefetches groups, and reshards idle ones that exceed the limits.

    Args:
        groups: groups that are gathered before use.
        limits: limits of gathered parameters.
    """

    def __init__(self, groups: list[ShardGroup], limits: PrefetchLimits) -> None:
        self.groups, self.limits, self.trace = groups, limits, ModuleOrder()
        everything = sum(g.numel for g in groups)
        if min(limits.live, limits.reuse) >= everything:  # all may be gathered at once, so their memory is kept
            for group in groups:
                group.retain()
        self.peak = 0  # maximum number of elements that were gathered or in flight at once
        self.gathers = 0  # number of all-gathers
        self.late = 0  # number of all-gathers that were not prefetched, in passes with a recorded order
        self.profile: Callable[[str, int], AbstractContextManager[None]] | None = None  # of an event and its elements
        self._number = {id(g): number for number, g in enumerate(groups)}
        self._here: dict[int, ShardGroup] = {}  # groups that are gathered or in flight, by id
        self._used: dict[int, ShardGroup] = {}  # groups that are gathered for a running unit
        self._ahead: dict[int, ShardGroup] = {}  # prefetched groups in flight
        self._live = self._on_the_way = 0  # number of elements of `_here`, and of `_ahead`
        self._unit: tuple[ShardGroup, ...] = ()  # groups of the last gathered unit
        self._coming: list[int] = []  # heap: indices of uses in the last pass whose groups may be sharded
        self._idle: list[tuple[float, int]] = []  # heap of groups that may be idle: (- index of next use, number)
        self._restarts = -1
        for group in groups:
            self.note(group)

    def live(self) -> int:
        return self._live

    def note(self, group: ShardGroup) -> None:
        """Update the sums and queues after a possible change of a group's state."""
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
        """Add an unsharded group to the heap of idle groups; a sharded one to the heap to prefetch, if used again."""
        place = self.trace.place(group)
        if group.state is not State.SHARDED:
            heappush(self._idle, (-math.inf if place is None else -place, self._number[id(group)]))
        elif place is not None:
            heappush(self._coming, place)

    def _follow(self) -> None:
        """Rebuild both heaps if a new pass has begun."""
        if self._restarts != self.trace.restarts:
            self._restarts = self.trace.restarts
            self._coming.clear()
            self._idle.clear()
            for group in self.groups:
                self._queue(group)

    def make_room(self, group: ShardGroup) -> None:
        """Reshard idle groups, those needed last first, until a sharded group fits into the limit."""
        if group.state is State.SHARDED:
            self._evict(self.limits.live - group.numel)

    def _evict(self, limit: int) -> None:
        """Reshard idle groups, those needed last first, until at most `limit` elements are gathered."""
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
        """Wait until the groups of a unit are gathered, and prefetch the following ones."""
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
            if group.state is not State.GATHERED:
                with self._event(FETCH_WAIT, group) if group.state is State.INFLIGHT else _NOTHING:
                    group.wait_all_gather()
                self.note(group)
            if torch.is_grad_enabled():
                group.keep_secondary()

    def _event(self, name: str, group: ShardGroup) -> AbstractContextManager[None]:
        if self.profile is None:
            return _NOTHING
        return self.profile(name, sum(member.shape.numel() for member in group.members))  # without padding

    def _start(self, group: ShardGroup) -> None:
        group.start_all_gather(encoded=True)
        self.note(group)
        self.gathers += 1
        self.peak = max(self.peak, self._live)

    def _prefetch(self) -> None:
        """Start the all-gathers of the next unit (see `_prefetch_unit`), and of later groups within the limits."""
        if self.limits.prefetch <= 0 or not self._prefetch_unit():
            return
        for group in self._sharded_to_come():
            if self._on_the_way + group.numel > self.limits.prefetch or self._live + group.numel > self.limits.live:
                return
            self._start_ahead(group)

    def _read_ahead(self) -> None:
        """Start to load the shard of the next sharded group from its storage tier, before its all-gather."""
        group = next(self._sharded_to_come(), None) if self._coming and self.limits.prefetch > 0 else None
        if group is not None:
            group.expect_gather()

    def _prefetch_unit(self) -> bool:
        """Start the all-gathers of the next unit if the groups in use leave room; return False if they do not."""
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
            if group.state is State.SHARDED:  # a group may occur twice in a unit
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
        """Yield the sharded groups of the remaining uses in order; ends when the caller does not gather one."""
        while self._coming:
            place = self._coming[0]
            if not self.trace.over(place) and self.trace.at(place).state is State.SHARDED:
                yield self.trace.at(place)
                if self.trace.at(place).state is State.SHARDED:
                    return
            else:
                heappop(self._coming)

    def release(self, group: ShardGroup) -> None:
        """Reshard a group that is not in use, unless it is in the next unit, or the limits allow to keep it."""
        if group.users:
            return
        self._follow()
        self._used.pop(id(group), None)
        distance = self.trace.distance(group)
        if distance is None and not self.trace.known and torch.is_grad_enabled():
            distance = 0  # first pass, whose backward follows
        stays = distance is not None and distance <= self.limits.reuse and self._live <= self.limits.live
        ahead = self.limits.prefetch > 0
        if stays or (ahead and group in self.trace.next_unit()):  # the next unit would be prefetched again at once
            self._queue(group)
            return
        self._free(group)
        if ahead:
            self._prefetch_unit()

    def free_idle(self) -> None:
        """Reshard all groups that are not in use."""
        for group in list(self._here.values()):
            if not group.users:
                self._free(group)
