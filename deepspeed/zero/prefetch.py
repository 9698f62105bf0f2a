"""What to gather ahead and what to keep: the order of the last pass, and the limits of the JSON."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.zero.shard_group import ShardGroup, State


@dataclass(frozen=True)
class Limits:
    """Elements, not bytes, as in the JSON.

    Args:
        live: gathered at once (`stage3_max_live_parameters`).
        reuse: a group is kept if it is used again within so many gathered elements (`stage3_max_reuse_distance`).
        prefetch: on their way ahead of use (`stage3_prefetch_bucket_size`).
    """

    live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    prefetch: int = 50_000_000


class Trace:
    """The order in which groups were needed in the last pass, and where the running pass is in it."""

    def __init__(self) -> None:
        self._last: list[ShardGroup] = []
        self._now: list[ShardGroup] = []
        self._at = 0

    def restart(self) -> None:
        """A new pass begins (an engine's forward)."""
        if self._now:
            self._last = self._now
        self._now, self._at = [], 0

    def used(self, group: ShardGroup) -> None:
        """`group` is needed now."""
        self._now.append(group)
        for index in range(self._at, len(self._last)):
            if self._last[index] is group:
                self._at = index + 1
                return

    def coming(self) -> list[ShardGroup]:
        """What the last pass needed from here on, nearest first."""
        return self._last[self._at :]

    def distance(self, group: ShardGroup) -> int | None:
        """Elements needed before `group` is needed again; None when it is not, or not known."""
        passed = 0
        for index in range(self._at, len(self._last)):
            if self._last[index] is group:
                return passed
            passed += self._last[index].numel
        return None

    def is_invalid_trace(self) -> bool:
        """Whether there is no last pass to go by, under the name clients ask for."""
        return not self.known

    def _invalidate_trace(self) -> None:
        self._last, self._now, self._at = [], [], 0

    @property
    def known(self) -> bool:
        """Whether there is a last pass to go by."""
        return bool(self._last)


class Keeper:
    """Applies the limits: frees what may not stay, starts what will be needed.

    Args:
        groups: the groups that are gathered before use.
        limits: how much may be here.
    """

    def __init__(self, groups: list[ShardGroup], limits: Limits) -> None:
        self.groups, self.limits, self.trace = groups, limits, Trace()
        everything = sum(g.numel for g in groups)
        if min(limits.live, limits.reuse) >= everything:  # all may be here at once, so memory is set aside for all
            for group in groups:
                group.retain()
        self.peak = 0  # most elements gathered or in flight at once
        self.gathers = 0

    def live(self) -> int:
        """Elements gathered or in flight."""
        return sum(g.numel for g in self.groups if g.state is not State.SHARDED)

    def make_room(self, group: ShardGroup) -> None:
        """Free idle groups until `group` fits the live limit, or none is idle: first those needed last."""
        if group.state is not State.SHARDED:
            return
        idle = [g for g in self.groups if g.state is not State.SHARDED and not g.users and g is not group]
        coming = {id(g): i for i, g in reversed(list(enumerate(self.trace.coming())))}
        idle.sort(key=lambda g: -coming.get(id(g), len(coming) + 1))
        while idle and self.live() + group.numel > self.limits.live:
            idle.pop(0).free()

    def gather(self, group: ShardGroup) -> None:
        """Have `group` here, with what comes after it on its way."""
        self.trace.used(group)
        self.make_room(group)
        self._start(group)
        self._prefetch()
        group.finish_gather()

    def _start(self, group: ShardGroup) -> None:
        if group.state is State.SHARDED:
            group.start_gather()
            self.gathers += 1
            self.peak = max(self.peak, self.live())

    def _prefetch(self) -> None:
        on_the_way = sum(g.numel for g in self.groups if g.state is State.INFLIGHT and not g.users)
        live = self.live()
        for group in self.trace.coming():
            if group.state is not State.SHARDED:
                continue
            if on_the_way + group.numel > self.limits.prefetch or live + group.numel > self.limits.live:
                return
            self._start(group)
            on_the_way += group.numel
            live += group.numel

    def release(self, group: ShardGroup) -> None:
        """`group` is not in use any more: free it unless it is needed again soon and there is room."""
        if group.users:
            return
        distance = self.trace.distance(group)
        if distance is None and not self.trace.known:
            distance = 0  # the first pass: its backward is still to come
        if distance is None or distance > self.limits.reuse or self.live() > self.limits.live:
            group.free()

    def free_idle(self) -> None:
        """Free everything that is not in use (before an update, at the end of a pass)."""
        for group in self.groups:
            if not group.users:
                group.free()
