"""Axes: sets of ranks that communicate, such as the ranks along one dim of a mesh, with their process groups.

[Note: one axis per set] The dims of a mesh often contain the same ranks (with two ranks, `dp` is the world and also the
client's own group). Messages are distinguished by channel, and channels are numbered per axis. So all messages between
the same ranks and type of device use one `Axis`, whatever its names and process groups. Groups are created once per
set of ranks and are destroyed only with the world: creating one is a collective of all ranks, and uses descriptors and
threads that an engine must not leak.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from deepspeed.comm.shared_memory.transport import SharedMemory, forget_shared_memory, shared_memory_of
from deepspeed.comm.shutdown import Phase, released_in
from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.collective_event import CollectiveEvent
from deepspeed.comm.watchdog.last_collective import boot
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.foundation.fake_mode import Replaceable

PUBLIC = 1  # the channel of the public collectives of each axis
# Minimum number of ranks per host for hierarchical sums. With two, half as many sums cross hosts, but in fp32 and so
# twice as wide: no bytes are saved.
FEWEST_PER_HOST = 3


def tag_of(channel: int, kind: int, seq: int) -> int:
    """Return the 31-bit message tag of a channel, kind and sequence number. Tags below 2^30 belong to clients."""
    return 1 << 30 | (channel % (1 << 17)) << 13 | kind << 10 | seq % (1 << 10)


@dataclass(frozen=True)
class Hosts:
    """Hosts of an axis: `count` hosts with equal numbers of consecutive ranks; `within`: axis of this host's ranks."""

    count: int
    within: Axis


@dataclass(frozen=True)
class HostAxes:
    """Axes of two steps over hosts with equal numbers of consecutive ranks.

    Args:
        within: ranks of this host.
        across: the rank of each host with this rank's position on its host.
    """

    within: Axis
    across: Axis


@dataclass(eq=False)
class Axis:
    """The ranks along one mesh dim; dims with equal ranks share one axis.

    Args:
        name: name in labels; several names are joined by "+".
        ranks: global ranks, ascending.
        rank: position of this process in `ranks`.
        group: process group of `ranks`; None if nothing is sent: one rank, or meta tensors.
        tagged: messages have tags (gloo on CPU), so ranks may send in different orders.
        shared: memory that all ranks of the axis can read, or None.
        hosts: hosts of an axis whose reductions start within hosts; else None.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    tagged: bool
    shared: SharedMemory | None = field(default=None, repr=False)
    hosts: Hosts | None = field(default=None, repr=False)
    abandoned: deque[int] = field(default_factory=deque, repr=False)  # channels of dropped engines, still served
    _channels: itertools.count = field(default_factory=lambda: itertools.count(PUBLIC + 1), repr=False)
    _public: itertools.count = field(default_factory=itertools.count, repr=False)
    _reductions: Axis | None = field(default=None, repr=False)
    _messages: dict[tuple[tuple[int, int], ...], list[dist.ProcessGroup]] = field(default_factory=dict, repr=False)

    @property
    def reductions(self) -> Axis:
        """Return the axis to reduce over, with the communicator of `AxisRegistry.separate_reductions` if it exists."""
        return self._reductions or self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def spans_hosts(self) -> bool:
        """Return whether the ranks are on several hosts; False before a call of `AxisRegistry.find_hosts`."""
        hosts = axes_here().hosts
        return self.shared is None and len({hosts.get(rank) for rank in self.ranks}) > 1

    @property
    def peers(self) -> list[int]:
        """Return the positions of the other ranks."""
        return [r for r in range(self.size) if r != self.rank]

    def channel(self) -> int:
        """Return the number of a new message channel. All ranks open channels in the same order, so numbers agree."""
        return next(self._channels)

    def public_tag(self, kind: int) -> int:
        """Return the tag of the next public message of a kind (`EXCHANGE`, …); all ranks call this in one order."""
        return tag_of(PUBLIC, kind, next(self._public))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a 1-D uninitialized tensor, in shared memory if possible, so that other ranks read it in place."""
        if self.shared is not None and device.type == "cpu":
            return self.shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def also(self, name: str) -> Axis:
        """Add `name` to the names of this axis; returns the axis."""
        if name not in self.name.split("+"):
            self.name += f"+{name}"
        return self

    def even_cuts(self, numel: int) -> list[int]:
        """Return the boundaries of slices of `numel` elements, as equal as possible."""
        return [numel * r // self.size for r in range(self.size + 1)]

    @staticmethod
    def is_even(cuts: Sequence[int]) -> bool:
        """Return whether the slices start at element 0 and have equal lengths."""
        return all(cut == r * cuts[1] for r, cut in enumerate(cuts))

    def can_all_reduce(self, dtype: torch.dtype) -> bool:
        """Return whether `all_reduce_sum` supports this axis: shared memory, or two ranks without tags and fp32.

        The backend's all-reduce equals a sum in rank order only for two ranks. It has no tags, so ranks of a tagged
        axis, which may start collectives in different orders, cannot use it.
        """
        return self.shared is not None or (dtype == torch.float32 and self.size == 2 and not self.tagged)

    def collectives_begun(self) -> int:
        """Return the number of collectives that this process has started in groups with another rank of the axis."""
        if self.group is None:
            return 0
        count, ranks_here = 0, set(self.ranks)
        for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
            # torch also lists groups without this rank, under a number.
            if isinstance(group, dist.ProcessGroup) and len(ranks_here.intersection(ranks)) > 1:
                with suppress(RuntimeError):  # a backend that does not count
                    count += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return count

    def bytes_of_others(self, full: torch.Tensor, cuts: Sequence[int]) -> int:
        return (cuts[-1] - cuts[0] - cuts[self.rank + 1] + cuts[self.rank]) * full.itemsize

    @property
    def has_host_backend(self) -> bool:
        """Return whether the process group can send from host memory (as with "cpu:gloo,cuda:nccl")."""
        return self.group is not None and torch.device("cpu") in self.group._device_types

    def message_groups(self, edges: Sequence[tuple[int, int]]) -> list[dist.ProcessGroup | None]:
        """Return a communicator for each edge (sender, receiver). All ranks of the world must call this.

        Two stages that send to each other over one communicator without tags would deadlock, so each direction has its
        own. Edges are positions on the axis. With tags no communicator is needed: each entry is None.
        """
        if self.tagged or self.group is None:
            return [None] * len(edges)
        known = self._messages.get(tuple(edges))
        if known is None:
            rows: list[Any] = [None] * axes_here().size
            with CollectiveEvent.of_world("all_gather_object of the axes that send messages"):
                dist.all_gather_object(rows, self.ranks)
            backend, known = AxisRegistry.device_backend(self.group), []
            for ranks in sorted(set(rows)):
                pairs = [[ranks[position] for position in edge] for edge in edges]
                groups = [make_group(pair, watchdog.timeout(), backend) for pair in pairs]
                known = groups if ranks == self.ranks else known
            self._messages[tuple(edges)] = known
        return list(known)


def world_axis(name: str = "dp", device: torch.device | None = None) -> Axis:
    """Return the axis of all ranks of the process group, or of this process alone if there is no group.

    All ranks must call this; `name` and `device` as in `axis_of`.
    """
    return axis_of(range(dist.get_world_size() if dist.is_initialized() else 1), name, device)


def group_axis(name: str, group: dist.ProcessGroup, device: torch.device | None = None) -> Axis:
    """Return the axis of a client's process group, such as an `mpu`'s; see `axis_of`. Collective over the group."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return axes_here().axis(ranks, name, device, group)


def axis_of(ranks: Sequence[int], name: str, device: torch.device | None = None) -> Axis:
    """Return the axis of exactly these ranks, which must call this together.

    Args:
        ranks: global ranks in any order, this rank among them.
        name: name in labels.
        device: device of the tensors that are sent; None: CPU.

    Raises:
        ArgumentError: `ranks` repeats a rank, has a rank outside of the world, or lacks this rank.
        UsageError: these ranks have no process group yet.
    """
    registry, key = axes_here(), tuple(sorted(ranks))
    if len(set(key)) < len(key) or not set(key) <= set(range(registry.size)) or registry.rank not in key:
        raise ArgumentError(
            f"axis {name!r}: {list(ranks)} must be different ranks of the world of {registry.size}, "
            f"rank {registry.rank} among them"
        )
    return registry.axis(key, name, device)


def make_axes(rows: Sequence[Sequence[int]], name: str, device: torch.device | None = None) -> Axis:
    """Partition the world into rows and return the axis of this rank's row. All ranks of the world must call this.

    Other arguments as in `axis_of`.

    Raises:
        ArgumentError: the rows are not a partition of the world.
    """
    registry = axes_here()
    cut = [tuple(sorted(row)) for row in rows]
    if sorted(rank for row in cut for rank in row) != list(range(registry.size)):
        raise ArgumentError(f"axis {name!r}: {list(rows)} does not hold each of the {registry.size} ranks once")
    registry.make_groups(cut, "cpu" if device is None else device.type)
    return registry.axis(next(row for row in cut if registry.rank in row), name, device)


def has_group() -> bool:
    """Return whether there is a process group."""
    return dist.is_initialized()


def require_group() -> None:
    """Raise UsageError if there is no process group."""
    if not has_group():
        raise UsageError(
            "DeepSpeed backend not set, there is no process group: call deepspeed.init_distributed() or "
            "deepspeed.initialize() first."
        )


def make_group(ranks: list[int] | None, timeout: timedelta, backend: str | None = None, **options: Any) -> Any:
    """Call torch's new_group under the watchdog; arguments and result as there. All ranks call this in one order.

    With `use_local_synchronization`, only the members call it, so that it is not in the desync trail of the world.
    """
    label = f"new_group {ranks or 'of all ranks'}"
    of_members = options.get("use_local_synchronization", False)
    with CollectiveEvent(label, ranks) if of_members else CollectiveEvent.of_world(label):
        return dist.new_group(ranks, timeout, backend, **options)


class AxisRegistry:
    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = world
        self.rank, self.size = (0, 1) if world is None else (dist.get_rank(), dist.get_world_size())
        self.axes: dict[tuple[tuple[int, ...], str], Axis] = {}
        self.made: dict[tuple[int, ...], Any] = {}  # groups made here, by ranks: the same sets on every rank
        self.hosts: dict[int, str] = {}  # boot id of each rank's host, after `find_hosts`
        self.host_axes: dict[tuple[int, ...], HostAxes] = {}  # by ranks of an axis, after `divide_by_host`

    def find_hosts(self) -> None:
        """Exchange the ranks' hosts, for `Axis.spans_hosts`. All ranks of the world must call this."""
        if self.hosts or self.world is None or "fake" in str(dist.get_backend(self.world)):
            return
        boots: list[Any] = [None] * self.size
        with CollectiveEvent.of_world("all_gather_object of the hosts"):
            dist.all_gather_object(boots, boot() or socket.gethostname())
        self.hosts = dict(enumerate(boots))

    def divide_by_host(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Create `host_axes` of rows that partition the world, after `find_hosts`. All ranks must call this.

        No effect unless every row has several hosts with equal numbers of consecutive ranks, at least two.
        """
        within, across = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for row in rows:
            parts = [tuple(part) for _, part in itertools.groupby(row, lambda rank: self.hosts.get(rank))]
            lengths, names = {len(part) for part in parts}, {self.hosts.get(part[0]) for part in parts}
            if len(lengths) > 1 or len(parts) < 2 or len(parts[0]) < 2 or len(names) < len(parts):
                return
            within += parts
            across += list(zip(*parts, strict=True))
        own = next(row for row in rows if self.rank in row)
        if own not in self.host_axes:
            axes = [
                make_axes(split, name, device) for split, name in ((within, "within host"), (across, "across hosts"))
            ]
            if self._all_of_world(axes[0].shared is not None or not axes[0].tagged):
                self.host_axes[own] = HostAxes(*axes)

    def _all_of_world(self, shares: bool) -> bool:
        """Return whether all ranks pass True: that they share memory within their hosts."""
        votes: list[Any] = [None] * self.size
        with CollectiveEvent.of_world("all_gather_object of the hosts that share memory"):
            dist.all_gather_object(votes, shares)
        return all(votes)

    def make_groups(self, rows: Sequence[tuple[int, ...]], where: str) -> None:
        """Create the missing process groups of rows of ranks; all ranks of the world must call this with equal rows.

        `where` is a device type; on "meta" nothing is sent, and no group is created.
        """
        for row in rows if where != "meta" else ():
            if 1 < len(row) < self.size and row not in self.made:
                self.made[row] = make_group(list(row), watchdog.timeout())

    def axis(
        self, ranks: tuple[int, ...], name: str, device: torch.device | None, group: dist.ProcessGroup | None = None
    ) -> Axis:
        """Return the axis of `ranks` (ascending); the first call creates it over an existing process group.

        Arguments as in `axis_of`, and `group`: a process group of the client. Raises UsageError if there is no group.
        """
        where = "cpu" if device is None else device.type
        known = self.axes.get((ranks, where))
        if known is None or not self._alive(known.group):
            known = self.axes[ranks, where] = self.new_axis(ranks, name, where, group)
        return known.also(name)

    def new_axis(self, ranks: tuple[int, ...], name: str, where: str, group: dist.ProcessGroup | None) -> Axis:
        me = ranks.index(self.rank)
        if len(ranks) == 1:
            return Axis(name, ranks, 0, None, True)
        if where == "meta":  # a simulation, whose tensors have no values to send
            return Axis(name, ranks, me, None, False)
        group = self._group(ranks, name, where, group)
        tagged = where == "cpu" and "fake" not in str(dist.get_backend(group))
        return Axis(name, ranks, me, group, tagged, shared_memory_of(group) if tagged else None)

    def _group(
        self, ranks: tuple[int, ...], name: str, where: str, group: dist.ProcessGroup | None
    ) -> dist.ProcessGroup:
        """Return a group of these ranks, preferably one that supports `where`; UsageError if there is none."""
        others = [axis.group for (held, _), axis in self.axes.items() if held == ranks]
        own = [self.world if len(ranks) == self.size else None, self.made.get(ranks), *others, group]
        alive = [candidate for candidate in own if candidate is not None and self._alive(candidate)]
        if not alive:
            raise UsageError(f"axis {name!r}: ranks {list(ranks)} have no process group; make_axes() makes it")
        return next((candidate for candidate in alive if self._moves(candidate, where)), alive[0])

    def separate_reductions(self, axes: Iterable[Axis], everyone: Axis) -> None:
        """Create communicators for `Axis.reductions` of `axes`; on a shared one, reductions would delay gathers.

        Axes with tags need none. Axes differ between ranks (for example between pipeline stages), and all ranks must
        create groups in the same order. So all ranks of `everyone`, the axis of the world, must call this.
        """
        self._make_reductions(
            [axis for axis in dict.fromkeys(axes) if axis.size > 1 and axis._reductions is None], everyone
        )

    def _make_reductions(self, lacking: list[Axis], everyone: Axis) -> None:
        backend = self.device_backend(everyone.group)
        if everyone.tagged or everyone.size < self.size or backend in (None, "fake", "mpi"):
            return
        lacking = [axis for axis in lacking if self.device_backend(axis.group) == backend]
        needs: list[Any] = [None] * self.size
        with CollectiveEvent.of_world("all_gather_object of the axes that reduce"):
            dist.all_gather_object(needs, (self._own_place(), [axis.ranks for axis in lacking]))
        hosts = self._hosts([place for place, _ in needs])
        rank_sets = {ranks for _, sets in needs for ranks in sets}
        wanted = {each for ranks in rank_sets for each in self.communicators_of(ranks, self.by_host(ranks, hosts))}
        groups = {ranks: make_group(list(ranks[1]), watchdog.timeout(), backend) for ranks in sorted(wanted)}
        for axis in lacking:
            axis._reductions = self.reducing_axis(axis, self.by_host(axis.ranks, hosts), groups)

    @staticmethod
    def by_host(ranks: Sequence[int], hosts: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
        """Split ranks by host; `hosts`: a key of the host by rank.

        Returns [] if hierarchical sums save nothing, or unless hosts have equal numbers of consecutive ranks.
        """
        rows = [tuple(row) for _, row in itertools.groupby(ranks, lambda rank: hosts[rank])]
        alike = len({len(row) for row in rows}) == 1 and len(rows) == len({hosts[rank] for rank in ranks})
        return rows if alike and len(rows) > 1 and len(rows[0]) >= FEWEST_PER_HOST else []

    @staticmethod
    def communicators_of(ranks: Sequence[int], rows: Iterable[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the communicators of a reducing axis: the axis as (0, ranks), each row of `by_host` as (1, row)."""
        return [(0, tuple(ranks)), *((1, tuple(row)) for row in rows)]

    @staticmethod
    def reducing_axis(
        axis: Axis, rows: Sequence[tuple[int, ...]], groups: Mapping[tuple[int, tuple[int, ...]], Any]
    ) -> Axis:
        hosts, me = None, axis.ranks[axis.rank]
        for row in rows:
            if me in row:
                hosts = Hosts(len(rows), Axis(f"{axis.name} within a host", row, row.index(me), groups[1, row], False))
        return replace(axis, group=groups[0, axis.ranks], hosts=hosts)

    @staticmethod
    def device_backend(group: dist.ProcessGroup | None) -> str | None:
        """Return the name of the group's backend for devices other than the CPU; None if there is none."""
        devices = [] if group is None else [device for device in group._device_types if device.type != "cpu"]
        return group._get_backend(devices[0]).name() if group is not None and devices else None

    @staticmethod
    def _moves(group: dist.ProcessGroup, where: str) -> bool:
        """Return whether the group's backend supports the device type `where`; assumed except for the CPU."""
        return where != "cpu" or any(name in str(dist.get_backend(group)) for name in ("gloo", "fake"))

    @staticmethod
    def _alive(group: dist.ProcessGroup | None) -> bool:
        return group is None or group in dist.distributed_c10d._world.pg_map

    @staticmethod
    def _own_place() -> tuple[str, int]:
        """Return the host name and LOCAL_RANK (0 if not set)."""
        return socket.gethostname(), int(os.environ.get("LOCAL_RANK") or 0)

    @staticmethod
    def _hosts(places: Sequence[tuple[str, int]]) -> dict[int, Hashable]:
        """Return a key of each rank's host: (host name, first rank on the host), since containers can share names.

        The first rank is 0 for hosts whose ranks all have LOCAL_RANK 0, which then does not number a host's ranks.
        """
        numbered = {name for name, local in places if local}
        return {rank: (name, rank - local if name in numbered else 0) for rank, (name, local) in enumerate(places)}


registries: Replaceable[type[AxisRegistry]] = Replaceable(AxisRegistry)
_registries: dict[dist.ProcessGroup | None, AxisRegistry] = {}  # by world; one at a time


def axes_here() -> AxisRegistry:
    """Return the axis registry of the current process group; the registry of an earlier one is dropped."""
    world = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    if world not in _registries:
        forget_axes()
        _registries[world] = registries.current(world)
    return _registries[world]


@released_in(Phase.AXES)
def forget_axes() -> None:
    """Drop all axes after process groups were destroyed or changed; axes stored elsewhere are invalid then."""
    _registries.clear()
    forget_shared_memory()


_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by world group: a new world has new groups


def get_own_group() -> Any:
    """Return a group of only this process; other ranks need not call this. UsageError without a process group."""
    require_group()
    world = dist.distributed_c10d._get_default_group()
    if world not in _groups:
        _groups[world] = make_group([dist.get_rank()], watchdog.timeout(), use_local_synchronization=True)
    return _groups[world]
